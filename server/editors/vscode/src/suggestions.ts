// Suggestions of the language server, predicted insertions among them, and their outcomes.
import * as vscode from "vscode";
import type { Middleware } from "vscode-languageclient";
import { type Edit, type Link, DISMISSED, SHOWN, rangeOf } from "./link.js";

// Suggestions count as shown when they are provided, and as dismissed when other text is typed in their place: VS Code
// reports more only through a proposed interface.
export class Suggestions {
  private last: { items: vscode.InlineCompletionItem[]; uri: string; start: vscode.Position } | undefined;

  /** predicted: the predicted insertion at a position, if there is one. */
  constructor(
    private readonly link: Link,
    private readonly predicted: (document: vscode.TextDocument, position: vscode.Position) => Edit | undefined = () => undefined,
  ) {}

  /** The suggestions at a position. ask: requests the language server's. */
  readonly at: NonNullable<Middleware["provideInlineCompletionItems"]> = async (document, position, context, token, ask) => {
    this.settle(document, position);
    const edit = this.predicted(document, position);
    const answer = edit === undefined
      ? ((await ask(document, position, context, token)) ?? [])
      : [new vscode.InlineCompletionItem(edit.text, rangeOf(edit.range), edit.command)];
    const items = Array.isArray(answer) ? answer : answer.items;
    if (items.length > 0) {
      this.last = { items, uri: document.uri.toString(), start: items[0]?.range?.start ?? position };
    }
    items.forEach(({ command }) => this.link.notify(SHOWN, { item: { command } }));
    return items;
  };

  // Reports the last suggestions as dismissed if none of them begins with the text that now stands in their place.
  private settle(document: vscode.TextDocument, position: vscode.Position): void {
    const { last } = this;
    if (last === undefined || last.uri !== document.uri.toString()) {
      return;
    }
    const { items, start } = last;
    const texts = items.map((item) => item.insertText as string); // the language server sends no snippets
    const typed = position.isBefore(start) ? undefined : document.getText(new vscode.Range(start, position));
    if (typed === undefined || !texts.some((text) => text.startsWith(typed))) {
      this.last = undefined;
      items.forEach(({ command }) => this.link.notify(DISMISSED, { item: { command } }));
    } else if (texts.includes(typed)) {
      this.last = undefined; // typed or accepted completely
    }
  }
}
