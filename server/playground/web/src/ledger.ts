// The step and the tree node of each token.
import type { StepTree } from "./wire";

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
 * The steps of one answer. The joined texts of all tokens are the answer's text: a token with a part of a character has no
 * text, and the token that completes it has the whole character.
 */
export class Ledger {
  readonly steps: Step[] = [];
  readonly tokens: Token[] = [];

  add(text: string, tokenIds: readonly number[], tree: StepTree | null): void {
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
  let drafted = 0;
  let accepted = 0;
  for (const { tree } of steps) {
    if (!tree) continue;
    drafted += tree.nodes.length - 1;
    accepted += tree.accepted.length;
  }
  return { drafted, accepted };
}
