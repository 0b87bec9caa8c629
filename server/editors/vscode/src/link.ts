// The extension's interface to its language server.
import type { CancellationToken } from "vscode";
import type { Command, InlineCompletionParams, Range, VersionedTextDocumentIdentifier } from "vscode-languageclient";

export type PredictParams = InlineCompletionParams & { textDocument: VersionedTextDocumentIdentifier };

/** A text suggested for a place. */
export interface Suggested {
  insertText: string;
  range: Range;
  command: Command;
}

/** A predicted change of a document. */
export interface Edit {
  text: string;
  range: Range;
  command: Command;
}

export interface Link {
  complete(params: InlineCompletionParams, token: CancellationToken): Promise<Suggested[] | null>;
  predict(params: PredictParams, token: CancellationToken): Promise<{ edits: Edit[] } | null>;
  notify(method: string, params: object): void;
}
