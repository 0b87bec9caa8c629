import assert from "node:assert/strict";
import { test } from "node:test";
import type { InlineCompletionParams } from "vscode-languageclient";
import type { Suggested } from "../src/link.js";
import { Provider } from "../src/provider.js";
import { Document, Position, Range } from "./fake_vscode.js";

const AT = { line: 0, character: 4 };
const ITEM: Suggested = {
  insertText: "total",
  range: { start: AT, end: AT },
  command: { title: "Accept", command: "specdec.didAcceptCompletion", arguments: ["s1"] },
};

function editor(answer: () => Suggested[] | null = () => [ITEM]) {
  const asked: InlineCompletionParams[] = [];
  const told: [string, object][] = [];
  const provider = new Provider({
    predict: async () => null,
    complete: async (params) => {
      asked.push(params);
      return answer();
    },
    notify: (method, params) => told.push([method.replace("textDocument/did", ""), params]),
  });
  const document = new Document("file:///a.py", "x = ");
  const ask = (character: number, context: object = { triggerKind: 1 }, cancelled = false) =>
    provider.provideInlineCompletionItems(
      document as never, new Position(0, character) as never, context as never,
      { isCancellationRequested: cancelled } as never,
    );
  return { asked, told, document, ask };
}

test("asks as LSP has it, and gives what comes back", async () => {
  const { asked, ask, told } = editor();
  const [item] = await ask(4);
  assert.deepEqual(asked, [{ textDocument: { uri: "file:///a.py" }, position: AT, context: { triggerKind: 2 } }]);
  assert.equal(item?.insertText, "total");
  assert.deepEqual(item?.range, new Range(0, 4, 0, 4));
  assert.equal(item?.command, ITEM.command);
  assert.deepEqual(told, [["ShowCompletion", { item: ITEM }]]);
});

test("passes on what the menu has selected, and that it was invoked", async () => {
  const { asked, ask } = editor();
  await ask(4, { triggerKind: 0, selectedCompletionInfo: { range: new Range(0, 2, 0, 4), text: "to" } });
  assert.deepEqual(asked[0]?.context, {
    triggerKind: 1,
    selectedCompletionInfo: { range: { start: { line: 0, character: 2 }, end: AT }, text: "to" },
  });
});

test("takes no answer, failures and cancelled requests", async () => {
  assert.deepEqual(await editor(() => null).ask(4), []);
  const failing = editor(() => {
    throw new Error("gone");
  });
  assert.deepEqual(await failing.ask(4), []);
  const late = editor();
  assert.deepEqual(await late.ask(4, { triggerKind: 1 }, true), []);
  assert.deepEqual(late.told, []);
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
  const other = { ...ITEM, insertText: "sum" };
  for (const [text, dismissed] of [["x = total", []], ["x = none", [ITEM, other]]] as const) {
    let answer = [ITEM, other];
    const { document, ask, told } = editor(() => answer);
    await ask(4);
    answer = [];
    document.text = text;
    await ask(text.length);
    const seen = told.filter(([method]) => method === "DismissCompletion").map(([, params]) => params);
    assert.deepEqual(seen, dismissed.map((item) => ({ item })));
  }
});
