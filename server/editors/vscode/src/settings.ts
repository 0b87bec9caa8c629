// The user's settings as the language server's command line and options.
import * as vscode from "vscode";
import type { Executable } from "vscode-languageclient/node";

export const SECTION = "specdec";

const FILES = [["keyFile", "--key-file"], ["ca", "--ca"], ["cert", "--cert"], ["certKey", "--cert-key"]] as const;

// Settings whose change restarts the process.
export const STARTING = ["command", "server", "tls", ...FILES.map(([name]) => name)].map((name) => `${SECTION}.${name}`);

export function start(): Executable {
  const settings = vscode.workspace.getConfiguration(SECTION);
  const [command = "specdec", ...args] = settings.get<string[]>("command", []);
  args.push("lsp", "--server", settings.get("server", "127.0.0.1:8400"));
  if (settings.get("tls", false)) {
    args.push("--tls");
  }
  for (const [name, flag] of FILES) {
    const file = settings.get(name, "");
    if (file) {
      args.push(flag, file);
    }
  }
  return { command, args };
}

/** All settings: the language server ignores those of its start. */
export function options(): object {
  return vscode.workspace.getConfiguration().get(SECTION, {});
}
