import assert from "node:assert/strict";
import { test } from "node:test";
import { bestStep, branches, firstDifference, Run } from "../src/run";
import sample from "../src/sample.json";
import { layoutTree } from "../src/tree_layout";
import type { StepTree } from "../src/wire";
import { tree } from "./make";

function answer(ids: number[][]): Run {
  const run = new Run(1, "auto");
  run.add({ choices: [{ text: "", token_ids: [], finish_reason: null }] }, 5);
  ids.forEach((step, i) => run.add({ choices: [{ text: "ab", token_ids: step, finish_reason: null }] }, 100 + 30 * i));
  run.add({ choices: [{ text: "", finish_reason: "stop" }] }, 500);
  return run;
}

test("times are those of the tokens' arrival", () => {
  const run = answer([[1, 2], [3], [4, 5, 6]]);
  assert.equal(run.firstMs, 100);
  assert.equal(run.lastMs, 160);
  assert.equal(run.perTokenMs, 60 / 4);
  assert.equal(run.perStep, 2);
  assert.equal(run.text, "ababab");
  assert.equal(run.finishReason, "stop");
});

test("one chunk alone has no time per token", () => {
  assert.equal(answer([[1, 2]]).perTokenMs, null);
  assert.equal(answer([]).firstMs, null);
});

test("a chat's chunks are read alike", () => {
  const run = new Run(1, "on");
  const found = tree([["x", -1], ["hi", 0]], [1]);
  run.add({ choices: [{ delta: { content: "hi!" }, token_ids: [101, 4], step_tree: found, finish_reason: null }] }, 1);
  assert.deepEqual(run.tokens.map((token) => token.text), ["hi", "!"]);
});

test("answers differ where their tokens do", () => {
  assert.equal(firstDifference(answer([[1, 2], [3]]), answer([[1], [2, 3]])), null);
  assert.equal(firstDifference(answer([[1, 2]]), answer([[1, 5]])), 1);
  assert.equal(firstDifference(answer([[1, 2]]), answer([[1, 2, 3]])), 2);
});

test("the best step has the most branches, then the most tokens, and is the first such", () => {
  assert.equal(bestStep(answer([[1], [2, 3], [4, 5]]).steps)?.index, 1);
  assert.equal(bestStep([]), null);
  const run = new Run(1, "on");
  const chain = tree([["", -1], ["a", 0], ["b", 1], ["c", 2]], [1, 2, 3]);
  const forked = tree([["", -1], ["a", 0], ["b", 0], ["c", 1], ["d", 1]], [1]);
  const steps: [StepTree, number[]][] = [[chain, [1, 2, 3, 4]], [{ ...forked, accepted: [] }, [4]], [forked, [4, 5]], [forked, [4, 5, 6]]];
  for (const [found, ids] of steps) run.add({ choices: [{ text: "", token_ids: ids, step_tree: found, finish_reason: null }] }, 1);
  assert.deepEqual([branches(chain), branches(forked)], [0, 2]);
  assert.equal(bestStep(run.steps)?.index, 3);
  assert.deepEqual(run.stepTokenMs, [11 / 4, 11, 11 / 2, 11 / 3], "by the server's times");
});

test("the recorded step has branches and an accepted path", () => {
  assert.ok(branches(sample.tree) >= 2);
  assert.ok(sample.tree.accepted.length >= 2);
  assert.equal(layoutTree(sample.tree, true).length, sample.tree.nodes.length + 1);
});
