import assert from "node:assert/strict";
import { test } from "node:test";
import { firstDifference, Run } from "../src/run";
import { tree } from "./make";

function answer(ids: number[][]): Run {
  const run = new Run(1, "auto");
  run.add({ choices: [{ text: "", token_ids: [], finish_reason: null }] }, 5);
  ids.forEach((step, i) => run.add({ choices: [{ text: "ab", token_ids: step, finish_reason: null }] }, 100 + 30 * i));
  run.add({ choices: [{ text: "", finish_reason: "stop" }] }, 500);
  run.add({ choices: [], usage: { prompt_tokens: 7, completion_tokens: 3 } }, 501);
  return run;
}

test("times are those of the tokens' arrival", () => {
  const run = answer([[1, 2], [3], [4, 5, 6]]);
  assert.equal(run.firstMs, 100);
  assert.equal(run.lastMs, 160);
  assert.equal(run.perTokenMs, 60 / 4);
  assert.deepEqual(run.stepTokenMs, [30, 10]);
  assert.equal(run.perStep, 2);
  assert.equal(run.text, "ababab");
  assert.deepEqual([run.finishReason, run.promptTokens], ["stop", 7]);
});

test("one chunk alone has no time per token", () => {
  assert.equal(answer([[1, 2]]).perTokenMs, null);
  assert.equal(answer([]).firstMs, null);
});

test("a chat's chunks are read alike", () => {
  const run = new Run(1, "on");
  const found = tree([["x", -1], ["hi", 0]], [1]);
  run.add({ choices: [{ delta: { content: "hi!" }, token_ids: [101, 4], step_tree: found, finish_reason: null }] }, 1);
  assert.deepEqual(run.ledger.tokens.map((token) => token.text), ["hi", "!"]);
});

test("answers differ where their tokens do", () => {
  assert.equal(firstDifference(answer([[1, 2], [3]]), answer([[1], [2, 3]])), null);
  assert.equal(firstDifference(answer([[1, 2]]), answer([[1, 5]])), 1);
  assert.equal(firstDifference(answer([[1, 2]]), answer([[1, 2, 3]])), 2);
});
