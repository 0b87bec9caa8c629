// The layout of a step's tree: depth to the right, one leaf per row.
import type { StepTree } from "./wire";

export type Outcome = "root" | "accepted" | "rejected" | "own";

/** `x`: depth; `y`: row. `node` is null for the target's own token. */
export interface Place {
  node: number | null;
  parent: number | null;
  x: number;
  y: number;
  outcome: Outcome;
}

/**
 * The accepted path is the top row; rejected nodes are below it, likeliest first. `own`: whether the target added a token.
 */
export function layoutTree(tree: StepTree, own: boolean): Place[] {
  const children: number[][] = tree.nodes.map(() => []);
  tree.nodes.forEach((node, i) => {
    if (i > 0) children[node.parent]?.push(i);
  });
  const accepted = new Set(tree.accepted);
  const end = tree.accepted.at(-1) ?? 0;
  const places: Place[] = [];
  let rows = 0;

  const rank = (a: number, b: number): number =>
    Number(accepted.has(b)) - Number(accepted.has(a)) || tree.nodes[b]!.chance - tree.nodes[a]!.chance;

  const place = (node: number, x: number, y: number): void => {
    const outcome = node === 0 ? "root" : accepted.has(node) ? "accepted" : "rejected";
    places.push({ node, parent: node === 0 ? null : tree.nodes[node]!.parent, x, y, outcome });
    rows = Math.max(rows, y + 1);
    let first = true;
    if (own && node === end) {
      places.push({ node: null, parent: node, x: x + 1, y, outcome: "own" });
      first = false;
    }
    for (const child of children[node]!.sort(rank)) {
      place(child, x + 1, first ? y : rows);
      first = false;
    }
  };
  place(0, 0, 0);
  return places;
}
