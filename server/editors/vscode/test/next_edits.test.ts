import assert from "node:assert/strict";
import { test } from "node:test";
import { NextEdits } from "../src/next_edits.js";
import { Document, Position, Range, commands, window } from "./fake_vscode.js";

test("a dismissal holds for one version of one document", async ({ mock }) => {
  mock.timers.enable({ apis: ["setTimeout"] });
  const asked: string[] = [];
  const edit = { text: "b", range: new Range(0, 0, 0, 1), command: { title: "", command: "taken" } };
  new NextEdits({
    predict: async ({ textDocument }) => {
      asked.push(`${textDocument.uri} ${textDocument.version}`);
      return { edits: [edit] };
    },
    notify: () => undefined,
  });
  const editors = ["a", "b"].map((uri) => ({
    document: new Document(uri, "a"), selection: { active: new Position(0, 1) }, setDecorations: () => undefined,
  }));
  const move = async (at: number) => {
    window.move(editors[at]);
    mock.timers.tick(100);
    await new Promise(setImmediate);
  };

  await move(0);
  commands.run("specdec.dismissEdit");
  await move(0);
  assert.deepEqual(asked, ["a 1"]);
  await move(1);
  assert.deepEqual(asked, ["a 1", "b 1"]);
  commands.run("specdec.dismissEdit");
  editors[1]!.document.version++;
  await move(1);
  assert.deepEqual(asked, ["a 1", "b 1", "b 2"]);
});
