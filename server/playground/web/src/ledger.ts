// Which token came from which step and from which node of its tree.
import type { StepTree } from "./wire";

/** `node`: where in its step's tree the token stands; null for one of the target's own. */
export interface Token {
  index: number;
  id: number;
  step: number;
  node: number | null;
  sources: readonly string[];
  text: string;
}

/** `atMs`: when it arrived, counted from the request. */
export interface Step {
  index: number;
  tokens: Token[];
  tree: StepTree | null;
  atMs: number;
}

export interface Piece {
  text: string;
  tokenIds: readonly number[];
  tree: StepTree | null;
  atMs: number;
}

/**
 * The steps of one answer. The texts of all tokens joined are the answer's text, whatever the server held back: a token that
 * is half a character shows nothing, and the one that completes it shows the whole.
 */
export class Ledger {
  readonly steps: Step[] = [];
  readonly tokens: Token[] = [];

  add(piece: Piece): void {
    if (!piece.tokenIds.length) {
      this.append(piece.text);
      return;
    }
    const { tree } = piece;
    const step: Step = { index: this.steps.length, tokens: [], tree, atMs: piece.atMs };
    const waiting = this.tokens.at(-1);
    let rest = piece.text;
    piece.tokenIds.forEach((id, i) => {
      const node = tree?.accepted[i] ?? null;
      const at = node === null ? undefined : tree?.nodes[node];
      const token = { index: this.tokens.length, id, step: step.index, node, sources: at?.sources ?? [], text: "" };
      step.tokens.push(token);
      this.tokens.push(token);
      // Half a character, as its token alone has it, is not in the text.
      const where = at === undefined ? -1 : rest.indexOf(at.text);
      if (at === undefined || where < 0) return;
      // What stands before it belongs to tokens whose own text is not known, or was held back.
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
}

/** How many tokens each drafter is to thank for (the first that proposed it); `target` counts the target's own. */
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
  let drafted = 0;
  let accepted = 0;
  for (const { tree } of steps) {
    if (!tree) continue;
    drafted += tree.nodes.length - 1;
    accepted += tree.accepted.length;
  }
  return { drafted, accepted };
}
