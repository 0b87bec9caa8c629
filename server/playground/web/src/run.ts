// One answer, while it arrives, and its times.
import { Ledger, type Step } from "./ledger";
import type { Chunk, StepTree } from "./wire";

export type Mode = "auto" | "off" | "on";
export type RunState = "running" | "done" | "stopped" | "failed";

export class Run {
  readonly ledger = new Ledger();
  state: RunState = "running";
  finishReason = "";
  firstMs: number | null = null;
  private firstTokens = 0;
  lastMs = 0;

  constructor(
    readonly number: number,
    readonly mode: Mode,
  ) {}

  /** Take in a chunk that arrived `atMs` after the request was sent. */
  add(chunk: Chunk, atMs: number): void {
    const choice = chunk.choices[0];
    if (!choice) return;
    const tokenIds = choice.token_ids ?? [];
    this.ledger.add(choice.text ?? choice.delta?.content ?? "", tokenIds, choice.step_tree ?? null);
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    if (!tokenIds.length) return;
    if (this.firstMs === null) {
      this.firstMs = atMs;
      this.firstTokens = tokenIds.length;
    }
    this.lastMs = atMs;
  }

  get tokens(): number {
    return this.ledger.tokens.length;
  }

  get text(): string {
    return this.ledger.tokens.map((token) => token.text).join("");
  }

  /** Milliseconds per token after the first chunk; null without such tokens. */
  get perTokenMs(): number | null {
    const later = this.tokens - this.firstTokens;
    return this.firstMs === null || later < 1 ? null : (this.lastMs - this.firstMs) / later;
  }

  get perStep(): number | null {
    const steps = this.ledger.steps.length;
    return steps ? this.tokens / steps : null;
  }

  /** Milliseconds per token of each step, as the server measured them. */
  get stepTokenMs(): number[] {
    return this.ledger.steps.flatMap(({ tree, tokens }) => (tree ? [(tree.draft_ms + tree.verify_ms) / tokens.length] : []));
  }
}

/** The first place at which two answers' tokens differ; null where they are the same. */
export function firstDifference(a: Run, b: Run): number | null {
  const [left, right] = [a.ledger.tokens, b.ledger.tokens];
  for (let i = 0; i < Math.max(left.length, right.length); i++) if (left[i]?.id !== right[i]?.id) return i;
  return null;
}

/** The first of the steps with the most branches, and among equals the most tokens, of those with an accepted token. */
export function bestStep(steps: readonly Step[]): Step | null {
  const worth = ({ tree, tokens }: Step): number => (tree?.accepted.length ? branches(tree) * 1000 : 0) + tokens.length;
  return steps.reduce<Step | null>((best, step) => (!best || worth(step) > worth(best) ? step : best), null);
}

/** Paths from the root beyond the first. */
export function branches(tree: StepTree): number {
  const parents = tree.nodes.slice(1).map((node) => node.parent);
  return parents.length - new Set(parents).size;
}
