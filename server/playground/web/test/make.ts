// Trees for tests.
import type { StepTree } from "../src/wire";

/** A tree from rows of (text, parent, chance, sources). */
export function tree(rows: [string, number, number?, string[]?][], accepted: number[]): StepTree {
  const nodes = rows.map(([text, parent, chance = 1, sources = ["suffix"]], i) => ({
    token_id: 100 + i,
    text,
    parent,
    chance,
    sources: i ? sources : [],
  }));
  return { nodes, accepted, draft_ms: 1, verify_ms: 10 };
}

/** A small source of numbers in 0..1 that repeats itself for a seed. */
export function random(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state * 1664525 + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}
