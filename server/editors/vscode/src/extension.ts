// Runs `specdec lsp` and provides its suggestions to VS Code.
import * as vscode from "vscode";
import { LanguageClient, RevealOutputChannelOn, State } from "vscode-languageclient/node";
import type { Edit, Link } from "./link.js";
import { NextEdits } from "./next_edits.js";
import { SECTION, STARTING, options, start } from "./settings.js";
import { type Status, StatusBar } from "./status_bar.js";
import { Suggestions } from "./suggestions.js";

const PREDICT = "textDocument/copilotInlineEdit";
const DOCUMENTS = ["file", "untitled", "vscode-remote", "vscode-notebook-cell"].map((scheme) => ({ scheme }));

const START_MS = 10_000; // milliseconds that a server gets to start before it may be killed

let client: LanguageClient | undefined;
let changes: Promise<void> = Promise.resolve(); // the last of the client's starts and stops

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  const bar = new StatusBar();
  const link: Link = {
    predict: async (params, token) =>
      client?.isRunning() ? client.sendRequest<{ edits: Edit[] }>(PREDICT, params, token) : null,
    notify: (method, params) => void client?.sendNotification(method, params).catch(() => undefined),
  };
  const edits = new NextEdits(link);
  const suggestions = new Suggestions(link, (document, position) => edits.insertionAt(document, position));
  const restart = () =>
    queue(async () => {
      await stop();
      begin(bar, suggestions);
    });
  context.subscriptions.push(
    bar,
    edits,
    vscode.commands.registerCommand("specdec.restart", restart),
    vscode.commands.registerCommand("specdec.toggle", () => toggle(context.globalState)),
    vscode.workspace.onDidChangeConfiguration(async (change) => {
      if (STARTING.some((name) => change.affectsConfiguration(name))) {
        await restart();
      } else if (change.affectsConfiguration(SECTION)) {
        link.notify("workspace/didChangeConfiguration", { settings: { [SECTION]: options() } });
      }
    }),
  );
  await restart();
}

export function deactivate(): Promise<void> {
  return queue(stop);
}

// One change at a time, so that each finds the client of the one before.
function queue(change: () => Promise<void>): Promise<void> {
  changes = changes.catch(() => undefined).then(change);
  return changes;
}

async function stop(): Promise<void> {
  const former = client;
  client = undefined;
  if (former?.state === State.Starting) {
    // A client refuses to stop while it starts. Where its server hangs, `dispose` kills that.
    const limit = new Promise<void>((resolve) => setTimeout(resolve, START_MS));
    await Promise.race([former.start(), limit]).catch(() => undefined);
  }
  await former?.dispose().catch(() => undefined);
}

function begin(bar: StatusBar, suggestions: Suggestions): void {
  bar.show({ state: "connecting", message: "", model: "", nextEdits: "" });
  const server = start();
  // A function: the client starts a crashed process again, with the settings of that moment.
  const fresh = new LanguageClient("specdec", "specdec", server, {
    documentSelector: DOCUMENTS, initializationOptions: options,
    middleware: { provideInlineCompletionItems: suggestions.at },
    revealOutputChannelOn: RevealOutputChannelOn.Never, // a request that fails is no message to the user, at every key
  });
  fresh.onNotification("specdec/didChangeStatus", (status: Status) => bar.show(status));
  fresh.onDidChangeState(({ newState }) => {
    if (client === fresh && newState === State.Stopped) {
      bar.show({ state: "away", message: "the language server has ended", model: "", nextEdits: "" });
    }
  });
  client = fresh;
  fresh.start().catch((error) => {
    if (client === fresh) {
      bar.show({ state: "away", message: `${server.command} cannot be started (${error})`, model: "", nextEdits: "" });
    }
  });
}

async function toggle(memory: vscode.Memento): Promise<void> {
  const settings = vscode.workspace.getConfiguration(SECTION);
  const mode = settings.get<string>("mode", "auto");
  if (mode !== "off") {
    await memory.update("modeWhenOn", mode); // for every window
  }
  const next = mode === "off" ? memory.get<string>("modeWhenOn", "auto") : "off";
  await settings.update("mode", next, vscode.ConfigurationTarget.Global);
}
