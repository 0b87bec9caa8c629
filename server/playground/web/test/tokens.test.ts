import assert from "node:assert/strict";
import { test } from "node:test";
import { acceptance, countBySource, Run } from "../src/run";
import { random, tree } from "./make";

const texts = (run: Run) => run.tokens.map((token) => token.text);

test("tokens go to their nodes, and the last to the target", () => {
  const run = new Run(1, "auto");
  const found = tree([["x", -1], ["a", 0, 0.9, ["model", "suffix"]], ["b", 1, 0.5, ["suffix"]], ["c", 0, 0.1, ["model"]]], [1, 2]);
  run.take("ab!", [101, 102, 7], found);
  assert.deepEqual(
    run.tokens.map(({ text, node, sources, step, index, id }) => ({ text, node, sources, step, index, id })),
    [
      { text: "a", node: 1, sources: ["model", "suffix"], step: 0, index: 0, id: 101 },
      { text: "b", node: 2, sources: ["suffix"], step: 0, index: 1, id: 102 },
      { text: "!", node: null, sources: [], step: 0, index: 2, id: 7 },
    ],
  );
  assert.deepEqual([...countBySource(run.tokens)], [["model", 1], ["suffix", 1], ["target", 1]]);
  assert.deepEqual(acceptance(run.steps), { drafted: 3, accepted: 2 });
});

test("a step that ends inside its path has no token of the target's own", () => {
  const run = new Run(1, "auto");
  run.take("ab", [101, 102], tree([["x", -1], ["a", 0], ["b", 1]], [1, 2]));
  assert.deepEqual(run.tokens.map((token) => token.node), [1, 2]);
});

test("half a character shows with the token that completes it", () => {
  const run = new Run(1, "auto");
  run.take("", [1], null);
  run.take("", [101, 2], tree([["\uFFFD", -1], ["\uFFFD", 0]], [1]));
  run.take("🙂 ok", [101, 3], tree([["\uFFFD", -1], [" ok", 0]], [1]));
  assert.deepEqual(texts(run), ["", "", "🙂", " ok", ""]);
});

test("text that was held back for a stop string comes to whom it belongs", () => {
  const run = new Run(1, "auto");
  run.take("", [9], null);
  run.take("##a", [101, 8], tree([["#", -1], ["a", 0]], [1]));
  run.take("tail", [], null);
  assert.deepEqual(texts(run), ["##", "a", "tail"]);
});

test("whatever is held back, the tokens' texts are the answer's text", () => {
  const next = random(3);
  for (let round = 0; round < 400; round++) {
    const run = new Run(1, "auto");
    let [said, held] = ["", ""];
    for (let step = 0; step < 8; step++) {
      const rows: [string, number][] = [["r", -1]];
      for (let i = 0; i < Math.floor(next() * 4); i++) rows.push([["a", "ba", "\uFFFD", " ", "aa"][Math.floor(next() * 5)]!, i]);
      const accepted = rows.slice(1).map((_, i) => i + 1);
      held += rows.slice(1).map(([text]) => text.replace("\uFFFD", "ü")).join("") + (next() < 0.5 ? "a" : "é");
      const out = next() < 0.3 ? "" : held.slice(0, Math.ceil(next() * held.length));
      held = held.slice(out.length);
      said += out;
      run.take(out, [...accepted, 0], tree(rows, accepted));
    }
    run.take(held, [], null);
    assert.equal(texts(run).join(""), said + held);
  }
});
