import assert from "node:assert/strict";
import { test } from "node:test";
import { Suggestions } from "../src/suggestions.js";
import { Document, InlineCompletionItem, Position, Range } from "./fake_vscode.js";

const ITEM = suggestion("total", "s1");

function suggestion(text: string, id: string) {
  const command = { title: "Accept", command: "specdec.didAcceptCompletion", arguments: [id] };
  return new InlineCompletionItem(text, new Range(0, 4, 0, 4), command);
}

function editor(answer: () => object | null = () => [ITEM]) {
  const told: [string, object][] = [];
  const suggestions = new Suggestions({
    predict: async () => null,
    notify: (method, params) => told.push([method.replace("textDocument/did", ""), params]),
  });
  const document = new Document("file:///a.py", "x = ");
  const ask = async (character: number) =>
    suggestions.at(document as never, new Position(0, character) as never, {} as never, {} as never, answer as never);
  return { told, document, ask };
}

test("gives what comes back, and reports it as shown", async () => {
  for (const answer of [[ITEM], { items: [ITEM] }]) {
    const { ask, told } = editor(() => answer);
    assert.deepEqual(await ask(4), [ITEM]);
    assert.deepEqual(told, [["ShowCompletion", { item: { command: ITEM.command } }]]);
  }
  const silent = editor(() => null);
  assert.deepEqual(await silent.ask(4), []);
  assert.deepEqual(silent.told, []);
});

test("typing another thing dismisses, typing it does not", async () => {
  const { document, ask, told } = editor();
  await ask(4);
  document.text = "x = tot";
  await ask(7);
  assert.deepEqual(told.map(([method]) => method), ["ShowCompletion", "ShowCompletion"]);
  document.text = "x = tots";
  await ask(8);
  assert.deepEqual(told.map(([method]) => method).slice(2), ["DismissCompletion", "ShowCompletion"]);
});

test("taken to its end is not dismissed", async () => {
  const { document, ask, told } = editor();
  await ask(4);
  document.text = "x = total";
  await ask(9);
  document.text = "x = total + 1";
  await ask(2);
  assert.equal(told.filter(([method]) => method === "DismissCompletion").length, 1); // of the second one
  assert.equal(told.length, 4);
});

test("of alternatives, the one that is taken dismisses no other", async () => {
  const other = suggestion("sum", "s2");
  for (const [text, dismissed] of [["x = total", []], ["x = none", [ITEM, other]]] as const) {
    let answer = [ITEM, other];
    const { document, ask, told } = editor(() => answer);
    await ask(4);
    answer = [];
    document.text = text;
    await ask(text.length);
    const seen = told.filter(([method]) => method === "DismissCompletion").map(([, params]) => params);
    assert.deepEqual(seen, dismissed.map(({ command }) => ({ item: { command } })));
  }
});
