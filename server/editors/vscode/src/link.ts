// The extension's interface to its language server.
import * as vscode from "vscode";
import type { Command, InlineCompletionParams, Range, VersionedTextDocumentIdentifier } from "vscode-languageclient";

export type PredictParams = InlineCompletionParams & { textDocument: VersionedTextDocumentIdentifier };

/** A predicted change of a document. */
export interface Edit {
  text: string;
  range: Range;
  command: Command;
}

export interface Link {
  predict(params: PredictParams, token: vscode.CancellationToken): Promise<{ edits: Edit[] } | null>;
  notify(method: string, params: object): void;
}

// Outcomes of suggestions and predicted edits, which their commands identify.
export const SHOWN = "textDocument/didShowCompletion";
export const DISMISSED = "textDocument/didDismissCompletion";

export function rangeOf({ start, end }: Range): vscode.Range {
  return new vscode.Range(start.line, start.character, end.line, end.character);
}
