// One answer while it arrives: its tokens, the steps that made them, and their times.
import type { Chunk, StepTree } from "./wire";

export type Mode = "auto" | "off" | "on";
export type RunState = "running" | "done" | "stopped" | "failed";

/** `node`: the token's node in its step's tree; null for the target's own token. */
export interface Token {
  index: number;
  id: number;
  step: number;
  node: number | null;
  sources: readonly string[];
  text: string;
}

export interface Step {
  index: number;
  tokens: Token[];
  tree: StepTree | null;
}

/**
 * The joined texts of all tokens are the answer's text: a token with a part of a character has no text, and the token that
 * completes it has the whole character.
 */
export class Run {
  readonly steps: Step[] = [];
  readonly tokens: Token[] = [];
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
    this.take(choice.text ?? choice.delta?.content ?? "", tokenIds, choice.step_tree ?? null);
    if (choice.finish_reason) this.finishReason = choice.finish_reason;
    if (!tokenIds.length) return;
    if (this.firstMs === null) {
      this.firstMs = atMs;
      this.firstTokens = tokenIds.length;
    }
    this.lastMs = atMs;
  }

  /** Take in the tokens of a step and the text that came with them; text without tokens belongs to earlier ones. */
  take(text: string, tokenIds: readonly number[], tree: StepTree | null): void {
    if (!tokenIds.length) {
      this.append(text);
      return;
    }
    const step: Step = { index: this.steps.length, tokens: [], tree };
    const waiting = this.tokens.at(-1);
    let rest = text;
    tokenIds.forEach((id, i) => {
      const node = tree?.accepted[i] ?? null;
      const at = node === null ? undefined : tree?.nodes[node];
      const token = { index: this.tokens.length, id, step: step.index, node, sources: at?.sources ?? [], text: "" };
      step.tokens.push(token);
      this.tokens.push(token);
      // A part of a character is not in the text.
      const where = at === undefined ? -1 : rest.indexOf(at.text);
      if (at === undefined || where < 0) return;
      // Text before it belongs to earlier tokens whose text is unknown or was delayed.
      const before = step.tokens.at(-2) ?? waiting;
      if (where > 0 && before) before.text += rest.slice(0, where);
      token.text = where > 0 && !before ? rest.slice(0, where) + at.text : at.text;
      rest = rest.slice(where + at.text.length);
    });
    this.steps.push(step);
    this.append(rest);
  }

  private append(text: string): void {
    const last = this.tokens.at(-1);
    if (last) last.text += text;
  }

  get text(): string {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Milliseconds per token after the first chunk; null without such tokens. */
  get perTokenMs(): number | null {
    const later = this.tokens.length - this.firstTokens;
    return this.firstMs === null || later < 1 ? null : (this.lastMs - this.firstMs) / later;
  }

  get perStep(): number | null {
    return this.steps.length ? this.tokens.length / this.steps.length : null;
  }

  /** Milliseconds per token of each step, as the server measured them. */
  get stepTokenMs(): number[] {
    return this.steps.flatMap(({ tree, tokens }) => (tree ? [(tree.draft_ms + tree.verify_ms) / tokens.length] : []));
  }
}

/** Tokens by the first drafter that proposed them; `target` counts the target's own. */
export function countBySource(tokens: readonly Token[]): Map<string, number> {
  const counts = new Map<string, number>();
  for (const token of tokens) {
    const name = token.sources[0] ?? "target";
    counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return counts;
}

/** Draft tokens verified and accepted in `steps`. */
export function acceptance(steps: readonly Step[]): { drafted: number; accepted: number } {
  const trees = steps.flatMap(({ tree }) => tree ?? []);
  const drafted = trees.reduce((sum, { nodes }) => sum + nodes.length - 1, 0);
  return { drafted, accepted: trees.reduce((sum, { accepted }) => sum + accepted.length, 0) };
}

/** The first place at which two answers' tokens differ; null where they are the same. */
export function firstDifference(a: Run, b: Run): number | null {
  for (let i = 0; i < Math.max(a.tokens.length, b.tokens.length); i++) if (a.tokens[i]?.id !== b.tokens[i]?.id) return i;
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
