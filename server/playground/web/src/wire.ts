// The server's messages.

export interface TreeNode {
  token_id: number;
  text: string;
  parent: number;
  chance: number;
  sources: string[];
}

/** The tree that one step verified. Node 0 is the last token before it; `accepted`: nodes whose tokens were emitted. */
export interface StepTree {
  nodes: TreeNode[];
  accepted: number[];
  draft_ms: number;
  verify_ms: number;
}

export interface Choice {
  text?: string;
  delta?: { content?: string };
  token_ids?: number[];
  step_tree?: StepTree;
  finish_reason: string | null;
}

export interface Chunk {
  choices: Choice[];
  error?: WireError;
}

export interface WireError {
  message: string;
  param?: string | null;
}

export interface Info {
  version: string;
  model: string;
  /** All served models; with several, requests name one. */
  models: string[];
  dtype: string;
  numeric_mode: string;
  max_context: number;
  drafters: string[];
  fills_in: boolean;
  /** Those that run, if the caller may read their reports. */
  experiments: string[];
}

export interface DrafterTrace {
  name: string;
  decision: string;
  proposed: number;
  verified: number;
  accepted: number;
  read: number;
}

/** The controller's record of an engine step, over all sequences. */
export interface StepTrace {
  step: number;
  prefill_rows: number;
  candidates: number;
  budget: number;
  predicted_tokens: number | null;
  realised_tokens: number;
  predicted_draft_ms: number | null;
  realised_draft_ms: number | null;
  predicted_verify_ms: number | null;
  realised_verify_ms: number | null;
  drafters: DrafterTrace[];
}
