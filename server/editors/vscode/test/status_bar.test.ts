import assert from "node:assert/strict";
import { test } from "node:test";
import { StatusBar } from "../src/status_bar.js";
import { ThemeColor, bars } from "./fake_vscode.js";

test("shows what the server is doing", () => {
  const bar = new StatusBar();
  const [shown] = bars;
  assert.deepEqual([shown?.text, shown?.visible, shown?.command], ["$(sync~spin) specdec", true, "specdec.toggle"]);
  bar.show({ state: "ready", message: "", model: "coder" });
  assert.equal(shown?.text, "$(sparkle) specdec");
  assert.match(String(shown?.tooltip), /coder/);
  assert.equal(shown?.backgroundColor, undefined);
  bar.show({ state: "away", message: "no server", model: "" });
  assert.match(String(shown?.tooltip), /no server/);
  assert.deepEqual(shown?.backgroundColor, new ThemeColor("statusBarItem.warningBackground"));
  bar.show({ state: "off", message: "", model: "" });
  assert.equal(shown?.text, "$(circle-slash) specdec");
  bar.dispose();
  assert.equal(shown?.visible, false);
});
