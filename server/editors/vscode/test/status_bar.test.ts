import assert from "node:assert/strict";
import { test } from "node:test";
import { StatusBar } from "../src/status_bar.js";
import { ThemeColor, bars } from "./fake_vscode.js";

test("shows what the server is doing", () => {
  const bar = new StatusBar();
  const [shown] = bars;
  assert.deepEqual([shown?.text, shown?.visible, shown?.command], ["$(sync~spin) specdec", true, "specdec.toggle"]);
  bar.show({ state: "busy", message: "", model: "coder", nextEdits: "" });
  assert.equal(shown?.text, "$(loading~spin) specdec");
  bar.show({ state: "ready", message: "", model: "coder", nextEdits: "not trained" });
  assert.match(String(shown?.tooltip), /coder. No next edits: not trained. Click/);
  assert.equal(shown?.text, "$(sparkle) specdec");
  assert.equal(shown?.backgroundColor, undefined);
  bar.show({ state: "away", message: "no server", model: "", nextEdits: "" });
  assert.match(String(shown?.tooltip), /no server/);
  assert.deepEqual(shown?.backgroundColor, new ThemeColor("statusBarItem.warningBackground"));
  bar.show({ state: "off", message: "", model: "", nextEdits: "" });
  assert.equal(shown?.text, "$(circle-slash) specdec");
  bar.dispose();
  assert.equal(shown?.visible, false);
});
