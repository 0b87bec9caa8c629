import assert from "node:assert/strict";
import { test } from "node:test";
import { layoutTree } from "../src/tree_layout";
import { random, tree } from "./make";

test("the accepted path runs along the top, and the target's own token ends it", () => {
  const places = layoutTree(
    tree([["x", -1], ["b", 0, 0.9], ["a", 0, 0.1], ["c", 2, 0.05], ["d", 2, 0.01]], [2, 3]),
    true,
  );
  const at = (node: number | null) => places.find((place) => place.node === node);
  assert.deepEqual([at(0), at(2), at(3), at(null)].map((place) => [place?.x, place?.y]), [[0, 0], [1, 0], [2, 0], [3, 0]]);
  assert.deepEqual([at(null)?.parent, at(null)?.outcome], [3, "own"]);
  assert.deepEqual([at(1)?.outcome, at(4)?.outcome, at(2)?.outcome], ["rejected", "rejected", "accepted"]);
  assert.deepEqual([at(1)?.y, at(4)?.y].sort(), [1, 2]);
});

test("a tree of one node is a root, and what the target said", () => {
  assert.deepEqual(layoutTree(tree([["x", -1]], []), true).map((place) => place.outcome), ["root", "own"]);
  assert.deepEqual(layoutTree(tree([["x", -1]], []), false).length, 1);
});

test("no two nodes stand in one place, children stand to the right of their parents and never above", () => {
  const next = random(11);
  for (let round = 0; round < 300; round++) {
    const rows: [string, number, number][] = [["x", -1, 1]];
    const size = Math.floor(next() * 40);
    for (let i = 1; i <= size; i++) rows.push([`${i}`, Math.floor(next() * i), next()]);
    const accepted: number[] = [];
    let node = 0;
    for (;;) {
      const children = rows.flatMap(([, parent], i) => (parent === node ? [i] : []));
      if (!children.length || next() < 0.3) break;
      node = children[Math.floor(next() * children.length)]!;
      accepted.push(node);
    }
    const own = next() < 0.8;
    const places = layoutTree(tree(rows, accepted), own);
    assert.equal(places.length, rows.length + Number(own));
    assert.equal(new Set(places.map((place) => `${place.x} ${place.y}`)).size, places.length);
    const where = new Map(places.map((place) => [place.node, place]));
    for (const place of places) {
      if (place.parent === null) continue;
      const parent = where.get(place.parent)!;
      assert.equal(place.x, parent.x + 1);
      assert.ok(place.y >= parent.y);
    }
    for (const i of [0, ...accepted]) assert.equal(where.get(i)!.y, 0);
  }
});
