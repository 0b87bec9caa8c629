// Runs `specdec lsp` and provides its suggestions to VS Code.
import * as vscode from "vscode";
import { LanguageClient, State } from "vscode-languageclient/node";
import type { DynamicFeature, InitializeParams, StaticFeature } from "vscode-languageclient";
import type { Edit, Link, Suggested } from "./link.js";
import { NextEdits } from "./next_edits.js";
import { Provider } from "./provider.js";
import { SECTION, STARTING, options, start } from "./settings.js";
import { type Status, StatusBar } from "./status_bar.js";

const COMPLETE = "textDocument/inlineCompletion";
const PREDICT = "textDocument/copilotInlineEdit";
const DOCUMENTS = [{ scheme: "file" }, { scheme: "untitled" }, { scheme: "vscode-remote" }];

// Without the client's own provider: `Provider` also reports outcomes.
class Client extends LanguageClient {
  // The server offers suggestions in the menu to editors without this capability.
  protected override fillInitializeParams(params: InitializeParams): void {
    super.fillInitializeParams(params);
    params.capabilities.textDocument = { ...params.capabilities.textDocument, inlineCompletion: {} };
  }

  override registerFeature(feature: StaticFeature | DynamicFeature<unknown>): void {
    const method = "registrationType" in feature ? feature.registrationType.method : "";
    if (method !== COMPLETE) {
      super.registerFeature(feature);
    }
  }
}

const START_MS = 10_000; // milliseconds that a server gets to start before it may be killed

let client: Client | undefined;
let changes: Promise<void> = Promise.resolve(); // the last of the client's starts and stops

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  const bar = new StatusBar();
  const link: Link = {
    complete: async (params, token) =>
      client?.isRunning() ? client.sendRequest<Suggested[]>(COMPLETE, params, token) : null,
    predict: async (params, token) =>
      client?.isRunning() ? client.sendRequest<{ edits: Edit[] }>(PREDICT, params, token) : null,
    notify: (method, params) => void client?.sendNotification(method, params).catch(() => undefined),
  };
  const edits = new NextEdits(link);
  const provider = new Provider(link, (document, position) => edits.insertionAt(document, position));
  context.subscriptions.push(
    bar,
    edits,
    vscode.languages.registerInlineCompletionItemProvider(DOCUMENTS, provider),
    vscode.commands.registerCommand("specdec.restart", () => restart(bar)),
    vscode.commands.registerCommand("specdec.toggle", toggle),
    vscode.workspace.onDidChangeConfiguration(async (change) => {
      if (STARTING.some((name) => change.affectsConfiguration(name))) {
        await restart(bar);
      } else if (change.affectsConfiguration(SECTION)) {
        link.notify("workspace/didChangeConfiguration", { settings: { [SECTION]: options() } });
      }
    }),
  );
  await restart(bar);
}

export function deactivate(): Promise<void> {
  return queue(stop);
}

function restart(bar: StatusBar): Promise<void> {
  return queue(async () => {
    await stop();
    begin(bar);
  });
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

function begin(bar: StatusBar): void {
  bar.show({ state: "connecting", message: "", model: "", nextEdits: "" });
  const server = start();
  // A function: the client starts a crashed process again, with the settings of that moment.
  const fresh = new Client("specdec", "specdec", server, { documentSelector: DOCUMENTS, initializationOptions: options });
  fresh.onNotification("specdec/didChangeStatus", (status: Status) => bar.show(status));
  client = fresh;
  fresh.start().catch((error) => {
    if (client === fresh) {
      bar.show({ state: "away", message: `${server.command} cannot be started (${error})`, model: "", nextEdits: "" });
    }
  });
}

async function toggle(): Promise<void> {
  const settings = vscode.workspace.getConfiguration(SECTION);
  const mode = settings.get("mode") === "off" ? "auto" : "off";
  await settings.update("mode", mode, vscode.ConfigurationTarget.Global);
}
