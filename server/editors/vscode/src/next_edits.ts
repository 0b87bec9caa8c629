// Predicted edits: shown as ghost text or as a small diff, jumped to and taken with one key.
import * as vscode from "vscode";
import { type Edit, type Link, DISMISSED, SHOWN, rangeOf } from "./link.js";

const CONDITION = "specdec.editShown"; // of the keybindings
const SETTLE_MS = 20; // one key changes the text and moves the cursor; the language server waits for the next key

interface Shown {
  editor: vscode.TextEditor;
  edit: Edit;
  range: vscode.Range;
}

export class NextEdits implements vscode.Disposable {
  private readonly removed = vscode.window.createTextEditorDecorationType({
    backgroundColor: new vscode.ThemeColor("diffEditor.removedTextBackground"),
    textDecoration: "line-through",
  });
  private readonly added = vscode.window.createTextEditorDecorationType({});
  private readonly parts: vscode.Disposable[];
  private shown: Shown | undefined;
  private insertion: (Shown & { version: number }) | undefined; // offered as ghost text
  private pending: vscode.CancellationTokenSource | undefined;
  private timer: ReturnType<typeof setTimeout> | undefined;

  constructor(private readonly link: Link) {
    this.parts = [
      this.removed,
      this.added,
      vscode.commands.registerCommand("specdec.nextEdit", () => this.jumpOrTake()),
      vscode.commands.registerCommand("specdec.dismissEdit", () => this.dismiss()),
      vscode.workspace.onDidChangeTextDocument(({ document, contentChanges }) => this.changed(document, contentChanges)),
      vscode.window.onDidChangeTextEditorSelection(({ textEditor }) => this.moved(textEditor)),
      vscode.window.onDidChangeActiveTextEditor(() => this.leave()),
    ];
  }

  /** The predicted insertion at a position, which is ghost text there. */
  insertionAt(document: vscode.TextDocument, position: vscode.Position): Edit | undefined {
    const { insertion } = this;
    const fits = insertion?.editor.document === document && insertion.version === document.version;
    return fits && insertion.range.start.isEqual(position) ? insertion.edit : undefined;
  }

  dispose(): void {
    this.leave();
    this.parts.forEach((part) => part.dispose());
  }

  private changed(document: vscode.TextDocument, changes: readonly object[]): void {
    if (changes.length > 0 && document === vscode.window.activeTextEditor?.document) {
      this.clear();
      this.later();
    }
  }

  private moved(editor: vscode.TextEditor): void {
    if (editor === vscode.window.activeTextEditor && this.shown === undefined) {
      this.later();
    }
  }

  private later(): void {
    this.stop();
    this.timer = setTimeout(() => void this.request(), SETTLE_MS);
  }

  private stop(): void {
    clearTimeout(this.timer);
    this.pending?.cancel();
  }

  private async request(): Promise<void> {
    const editor = vscode.window.activeTextEditor;
    if (editor === undefined) {
      return;
    }
    const { document, selection } = editor;
    const { version } = document;
    const source = (this.pending = new vscode.CancellationTokenSource());
    const answer = await this.link.predict({
      textDocument: { uri: document.uri.toString(), version },
      position: { line: selection.active.line, character: selection.active.character },
      context: { triggerKind: 2 },
    }, source.token).catch(() => null);
    const edit = answer?.edits[0];
    if (edit !== undefined && !source.token.isCancellationRequested && document.version === version) {
      this.show(editor, edit);
    }
  }

  private show(editor: vscode.TextEditor, edit: Edit): void {
    const range = rangeOf(edit.range);
    if (range.isEmpty && range.start.isEqual(editor.selection.active)) {
      this.insertion = { editor, edit, range, version: editor.document.version };
      void vscode.commands.executeCommand("editor.action.inlineSuggest.trigger");
      return;
    }
    this.shown = { editor, edit, range };
    editor.setDecorations(this.removed, range.isEmpty ? [] : [range]);
    editor.setDecorations(this.added, additions(editor.document, range, edit.text));
    void vscode.commands.executeCommand("setContext", CONDITION, true);
    this.report(SHOWN);
  }

  private report(outcome: string): void {
    if (this.shown !== undefined) {
      this.link.notify(outcome, { item: { command: this.shown.edit.command } });
    }
  }

  private clear(): void {
    this.insertion = undefined;
    if (this.shown !== undefined) {
      this.shown.editor.setDecorations(this.removed, []);
      this.shown.editor.setDecorations(this.added, []);
      this.shown = undefined;
      void vscode.commands.executeCommand("setContext", CONDITION, false);
    }
  }

  private leave(): void {
    this.stop();
    this.clear();
  }

  private dismiss(): void {
    this.report(DISMISSED);
    this.leave();
  }

  private async jumpOrTake(): Promise<void> {
    const { shown } = this;
    if (shown === undefined) {
      return;
    }
    const { editor, edit, range } = shown;
    const { line } = editor.selection.active;
    if (line < range.start.line || line > range.end.line) {
      editor.selection = new vscode.Selection(range.start, range.start);
      editor.revealRange(range, vscode.TextEditorRevealType.InCenterIfOutsideViewport);
      return;
    }
    this.clear();
    await editor.edit((builder) => builder.replace(range, edit.text));
    const { command, arguments: values = [] } = edit.command;
    await vscode.commands.executeCommand(command, ...values).then(undefined, () => undefined);
  }
}

/** The new text, behind the lines that it replaces. VS Code draws no lines of its own: further ones follow the last. */
function additions(document: vscode.TextDocument, range: vscode.Range, text: string): vscode.DecorationOptions[] {
  const lines = text.split(/\r?\n/);
  const rows = range.end.line - range.start.line + 1;
  const shown = [...lines.slice(0, rows - 1), lines.slice(rows - 1).join(" ⏎ ")];
  return shown.flatMap((contentText, i) => {
    const line = range.start.line + i;
    const end = line === range.end.line ? range.end : document.lineAt(line).range.end;
    const after = { contentText, backgroundColor: new vscode.ThemeColor("diffEditor.insertedTextBackground") };
    return contentText === "" ? [] : [{ range: new vscode.Range(end, end), renderOptions: { after } }];
  });
}
