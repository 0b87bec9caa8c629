// Inline completion from the language server, and the outcome of suggestions.
import * as vscode from "vscode";
import type { InlineCompletionItem, InlineCompletionParams, Range } from "vscode-languageclient";
import type { Edit, Link } from "./link.js";

const SHOWN = "textDocument/didShowCompletion";
const DISMISSED = "textDocument/didDismissCompletion";

interface Given {
  item: InlineCompletionItem;
  text: string;
  uri: string;
  range: Range;
}

// A suggestion counts as shown when it is provided, and as dismissed when other text is typed in its place: VS Code reports
// more only through a proposed interface.
export class Provider implements vscode.InlineCompletionItemProvider {
  private last: Given | undefined;

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
      return [this.shown(document, position, { insertText: edit.text, range: edit.range, command: edit.command })];
    }
    const answer = await this.link.complete(params(document, position, context), token).catch(() => null);
    if (answer === null || token.isCancellationRequested) {
      return [];
    }
    const items = Array.isArray(answer) ? answer : answer.items;
    return items.map((item) => this.shown(document, position, item));
  }

  private shown(
    document: vscode.TextDocument,
    position: vscode.Position,
    item: InlineCompletionItem,
  ): vscode.InlineCompletionItem {
    const text = typeof item.insertText === "string" ? item.insertText : item.insertText.value;
    const range = item.range ?? { start: position, end: position };
    this.last = { item, text, uri: document.uri.toString(), range };
    this.link.notify(SHOWN, { item });
    return new vscode.InlineCompletionItem(text, rangeOf(range), item.command);
  }

  // Reports the last suggestion as dismissed if the text in its place is no longer a prefix of it.
  private settle(document: vscode.TextDocument, position: vscode.Position): void {
    const { last } = this;
    if (last === undefined || last.uri !== document.uri.toString()) {
      return;
    }
    const start = new vscode.Position(last.range.start.line, last.range.start.character);
    const typed = position.isBefore(start) ? undefined : document.getText(new vscode.Range(start, position));
    if (typed === undefined || !last.text.startsWith(typed)) {
      this.last = undefined;
      this.link.notify(DISMISSED, { item: last.item });
    } else if (typed.length === last.text.length) {
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

function rangeOf(range: Range): vscode.Range {
  return new vscode.Range(range.start.line, range.start.character, range.end.line, range.end.character);
}
