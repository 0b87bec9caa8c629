// Inline completion from the language server, and the outcome of suggestions.
import * as vscode from "vscode";
import type { InlineCompletionParams } from "vscode-languageclient";
import type { Edit, Link, Suggested } from "./link.js";

const SHOWN = "textDocument/didShowCompletion";
const DISMISSED = "textDocument/didDismissCompletion";

// A suggestion counts as shown when it is provided, and as dismissed when other text is typed in its place: VS Code reports
// more only through a proposed interface.
export class Provider implements vscode.InlineCompletionItemProvider {
  private last: { item: Suggested; uri: string; range: vscode.Range } | undefined;

  /** predicted: the predicted insertion at a position, if there is one. */
  constructor(
    private readonly link: Link,
    private readonly predicted: (document: vscode.TextDocument, position: vscode.Position) => Edit | undefined = () => undefined,
  ) {}

  async provideInlineCompletionItems(
    document: vscode.TextDocument,
    position: vscode.Position,
    context: vscode.InlineCompletionContext,
    token: vscode.CancellationToken,
  ): Promise<vscode.InlineCompletionItem[]> {
    this.settle(document, position);
    const edit = this.predicted(document, position);
    if (edit !== undefined) {
      return [this.shown(document, { insertText: edit.text, range: edit.range, command: edit.command })];
    }
    const answer = await this.link.complete(params(document, position, context), token).catch(() => null);
    if (answer === null || token.isCancellationRequested) {
      return [];
    }
    return answer.map((item) => this.shown(document, item));
  }

  private shown(document: vscode.TextDocument, item: Suggested): vscode.InlineCompletionItem {
    const { start, end } = item.range;
    const range = new vscode.Range(start.line, start.character, end.line, end.character);
    this.last = { item, uri: document.uri.toString(), range };
    this.link.notify(SHOWN, { item });
    return new vscode.InlineCompletionItem(item.insertText, range, item.command);
  }

  // Reports the last suggestion as dismissed if the text in its place is no longer a prefix of it.
  private settle(document: vscode.TextDocument, position: vscode.Position): void {
    const { last } = this;
    if (last === undefined || last.uri !== document.uri.toString()) {
      return;
    }
    const { start } = last.range;
    const typed = position.isBefore(start) ? undefined : document.getText(new vscode.Range(start, position));
    if (typed === undefined || !last.item.insertText.startsWith(typed)) {
      this.last = undefined;
      this.link.notify(DISMISSED, { item: last.item });
    } else if (typed.length === last.item.insertText.length) {
      this.last = undefined; // typed or accepted completely
    }
  }
}

function params(
  document: vscode.TextDocument,
  position: vscode.Position,
  context: vscode.InlineCompletionContext,
): InlineCompletionParams {
  const menu = context.selectedCompletionInfo;
  return {
    textDocument: { uri: document.uri.toString() },
    position: plain(position),
    context: {
      triggerKind: context.triggerKind === vscode.InlineCompletionTriggerKind.Invoke ? 1 : 2,
      ...(menu && {
        selectedCompletionInfo: { range: { start: plain(menu.range.start), end: plain(menu.range.end) }, text: menu.text },
      }),
    },
  };
}

function plain(position: vscode.Position): { line: number; character: number } {
  return { line: position.line, character: position.character };
}
