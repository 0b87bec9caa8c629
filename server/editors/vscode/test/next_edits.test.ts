import assert from "node:assert/strict";
import { test } from "node:test";
import { NextEdits } from "../src/next_edits.js";
import { Document, Position, Range, commands, window } from "./fake_vscode.js";

test("an edit is reported as shown and as dismissed", async ({ mock }) => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const told: [string, object][] = [];
  const edit = { text: "b", range: new Range(0, 0, 0, 1), command: { title: "", command: "taken", arguments: ["e1"] } };
  new NextEdits({
    predict: async () => ({ edits: [edit] }),
    notify: (method, params) => told.push([method.replace("textDocument/did", ""), params]),
  });
  window.move({
    document: new Document("a", "a"), selection: { active: new Position(0, 1) }, setDecorations: () => undefined,
  });
  mock.timers.tick(100);
  await new Promise(setImmediate);
  commands.run("specdec.dismissEdit");
  commands.run("specdec.dismissEdit"); // nothing is shown
  const item = { command: edit.command };
  assert.deepEqual(told, [["ShowCompletion", { item }], ["DismissCompletion", { item }]]);
});
