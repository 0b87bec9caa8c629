// Inline completion from the language server, and the outcome of suggestions.
import * as vscode from "vscode";
import type { InlineCompletionParams } from "vscode-languageclient";
import type { Edit, Link, Suggested } from "./link.js";

const SHOWN = "textDocument/didShowCompletion";
const DISMISSED = "textDocument/didDismissCompletion";

// Suggestions count as shown when they are provided, and as dismissed when other text is typed in their place: VS Code
// reports more only through a proposed interface.
export class Provider implements vscode.InlineCompletionItemProvider {
  private last: { items: Suggested[]; uri: string; start: vscode.Position } | undefined;

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
      return this.shown(document, [{ insertText: edit.text, range: edit.range, command: edit.command }]);
    }
    const answer = await this.link.complete(params(document, position, context), token).catch(() => null);
    if (answer === null || token.isCancellationRequested) {
      return [];
    }
    return this.shown(document, answer);
  }

  private shown(document: vscode.TextDocument, items: Suggested[]): vscode.InlineCompletionItem[] {
    return items.map((item) => {
      const { start, end } = item.range;
      const range = new vscode.Range(start.line, start.character, end.line, end.character);
      this.last = { items, uri: document.uri.toString(), start: range.start };
      this.link.notify(SHOWN, { item });
      return new vscode.InlineCompletionItem(item.insertText, range, item.command);
    });
  }

  // Reports the last suggestions as dismissed if none of them begins with the text that now stands in their place.
  private settle(document: vscode.TextDocument, position: vscode.Position): void {
    const { last } = this;
    if (last === undefined || last.uri !== document.uri.toString()) {
      return;
    }
    const { items, start } = last;
    const typed = position.isBefore(start) ? undefined : document.getText(new vscode.Range(start, position));
    if (typed === undefined || !items.some((item) => item.insertText.startsWith(typed))) {
      this.last = undefined;
      items.forEach((item) => this.link.notify(DISMISSED, { item }));
    } else if (items.some((item) => item.insertText === typed)) {
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
