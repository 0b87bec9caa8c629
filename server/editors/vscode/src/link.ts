// The extension's interface to its language server.
import type { CancellationToken } from "vscode";

export interface Position {
  line: number;
  character: number;
}

export interface Range {
  start: Position;
  end: Position;
}

export interface Command {
  title: string;
  command: string;
  arguments?: unknown[];
}

export interface Item {
  insertText: string | { value: string };
  range?: Range;
  command?: Command;
}

export interface Params {
  textDocument: { uri: string; version?: number };
  position: Position;
  context: { triggerKind: 1 | 2; selectedCompletionInfo?: { range: Range; text: string } };
}

/** A predicted change of a document. */
export interface Edit {
  text: string;
  range: Range;
  command: Command;
}

export interface Link {
  complete(params: Params, token: CancellationToken): Promise<Item[] | { items: Item[] } | null>;
  predict(params: Params, token: CancellationToken): Promise<{ edits: Edit[] } | null>;
  notify(method: string, params: object): void;
}
