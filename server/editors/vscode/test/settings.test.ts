import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { STARTING, options, start } from "../src/settings.js";
import { configured } from "./fake_vscode.js";

const { contributes } = JSON.parse(readFileSync("package.json", "utf8"));
const properties: Record<string, { default: unknown; scope?: string }> = contributes.configuration.properties;

function configure(values: Record<string, unknown>): void {
  Object.keys(configured).forEach((name) => delete configured[name]);
  Object.assign(configured, values);
}

test("no workspace chooses what is run", () => {
  for (const name of STARTING) {
    assert.equal(properties[name]?.scope, "machine", name);
  }
});

test("the command line", () => {
  configure({});
  assert.deepEqual(start(), { command: "specdec", args: ["lsp", "--server", "127.0.0.1:8400"] });
  configure({ command: ["python3", "-m", "specdec.cli.main"], server: "gpu:1", tls: true, keyFile: "k", certKey: "ck", cert: "c", ca: "" });
  assert.deepEqual(start(), {
    command: "python3",
    args: ["-m", "specdec.cli.main", "lsp", "--server", "gpu:1", "--tls", "--key-file", "k", "--cert", "c", "--cert-key", "ck"],
  });
});

test("the language server gets the settings of the moment", () => {
  configure({ mode: "manual", maxLines: null });
  assert.deepEqual(options(), { mode: "manual", maxLines: null });
});
