// Drives a real `specdec lsp` with the extension's suggestions, over VS Code's own JSON-RPC:
//   node integration.js TEXT_FILE LINE CHARACTER COMMAND...
// Prints what it was suggested before and after typing, and the states it was told, as one line of JSON.
import { spawn } from "node:child_process";
import { readFileSync } from "node:fs";
import { StreamMessageReader, StreamMessageWriter, createProtocolConnection } from "vscode-languageserver-protocol/node";
import type { Edit } from "../src/link.js";
import type { Status } from "../src/status_bar.js";
import { Suggestions } from "../src/suggestions.js";
import { Document, InlineCompletionItem, Position } from "./fake_vscode.js";

const [file = "", line = "", character = "", command = "", ...args] = process.argv.slice(2);
const URI = "file:///project/a.py";
const TYPED = "tot";

async function main(): Promise<void> {
  const server = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
  const exited = new Promise((resolve) => server.on("exit", resolve));
  const connection = createProtocolConnection(
    new StreamMessageReader(server.stdout), new StreamMessageWriter(server.stdin),
  );
  const states: string[] = [];
  const ready = new Promise<void>((resolve) => {
    connection.onNotification("specdec/didChangeStatus", (status: Status) => {
      states.push(status.state);
      if (status.state === "ready") {
        resolve();
      }
    });
  });
  connection.listen();
  const { capabilities } = await connection.sendRequest<{ capabilities: Record<string, unknown> }>("initialize", {
    processId: process.pid, rootUri: "file:///project", capabilities: {}, initializationOptions: { debounceMs: 0 },
  });
  await connection.sendNotification("initialized", {});
  await ready;

  const suggestions = new Suggestions({
    predict: async () => null,
    notify: (method, params) => void connection.sendNotification(method, params),
  });
  // As the language client does it
  const next = async (_document: unknown, position: Position, { triggerKind }: { triggerKind: number }) => {
    const params = { textDocument: { uri: URI }, position, context: { triggerKind: triggerKind === 0 ? 1 : 2 } };
    const found = await connection.sendRequest<(Edit & { insertText: string })[]>("textDocument/inlineCompletion", params);
    return found.map(({ insertText, command }) => new InlineCompletionItem(insertText, undefined, command));
  };
  const ask = async (position: Position) =>
    suggestions.at(document as never, position as never, { triggerKind: 1 } as never, {} as never, next as never) as
      Promise<InlineCompletionItem[]>;
  const document = new Document(URI, readFileSync(file, "utf8"));
  const at = new Position(Number(line), Number(character));
  await connection.sendNotification("textDocument/didOpen", {
    textDocument: { uri: URI, languageId: "python", version: 1, text: document.text },
  });
  const first = await ask(at);

  const place = document.offsetAt(at);
  document.text = document.text.slice(0, place) + TYPED + document.text.slice(place);
  await connection.sendNotification("textDocument/didChange", {
    textDocument: { uri: URI, version: 2 },
    contentChanges: [{ range: { start: at, end: at }, text: TYPED }],
  });
  const second = await ask(new Position(at.line, at.character + TYPED.length));
  for (const { command: accept } of second) {
    await connection.sendRequest("workspace/executeCommand", accept as object);
  }

  await connection.sendRequest("shutdown");
  await connection.sendNotification("exit");
  const texts = [first, second].map((items) => items.map((item) => item.insertText));
  process.stdout.write(JSON.stringify({ capabilities, states, texts, code: await exited }));
}

void main();
