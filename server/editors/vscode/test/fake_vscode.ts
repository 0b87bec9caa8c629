// As much of VS Code as the extension touches, for tests that run without it.
export class Position {
  constructor(readonly line: number, readonly character: number) {}

  isBefore(other: Position): boolean {
    return this.line < other.line || (this.line === other.line && this.character < other.character);
  }

  isEqual(other: Position): boolean {
    return this.line === other.line && this.character === other.character;
  }
}

export class Range {
  readonly start: Position;
  readonly end: Position;

  constructor(start: Position | number, end: Position | number, endLine?: number, endCharacter?: number) {
    this.start = start instanceof Position ? start : new Position(start, end as number);
    this.end = start instanceof Position ? (end as Position) : new Position(endLine ?? 0, endCharacter ?? 0);
  }

  get isEmpty(): boolean {
    return this.start.isEqual(this.end);
  }
}

export class InlineCompletionItem {
  constructor(readonly insertText: string, readonly range?: Range, readonly command?: object) {}
}

export class CancellationTokenSource {
  readonly token = { isCancellationRequested: false };

  cancel(): void {
    this.token.isCancellationRequested = true;
  }
}

export class ThemeColor {
  constructor(readonly id: string) {}
}

export const ConfigurationTarget = { Global: 1 };
export const StatusBarAlignment = { Left: 1, Right: 2 };

export class Document {
  readonly uri: { toString(): string };
  version = 1;

  constructor(uri: string, public text: string) {
    this.uri = { toString: () => uri };
  }

  offsetAt(position: Position): number {
    const lines = this.text.split("\n");
    return lines.slice(0, position.line).reduce((sum, line) => sum + line.length + 1, 0) + position.character;
  }

  getText(range: Range): string {
    return this.text.slice(this.offsetAt(range.start), this.offsetAt(range.end));
  }
}

// What tests set, and what they look at.
export const configured: Record<string, unknown> = {};
export const bars: Record<string, unknown>[] = [];

const nothing = { dispose: () => undefined };
const ran: Record<string, () => unknown> = {};

export const commands = {
  registerCommand: (name: string, run: () => unknown) => {
    ran[name] = run;
    return nothing;
  },
  run: (name: string) => ran[name]?.(),
  executeCommand: async () => undefined,
};

export const workspace = {
  onDidChangeConfiguration: () => nothing,
  onDidChangeTextDocument: () => nothing,
  getConfiguration: (section?: string) => ({
    get: (name: string, fallback?: unknown) =>
      section === undefined && name === "specdec" ? { ...configured } : name in configured ? configured[name] : fallback,
    update: async (name: string, value: unknown) => void (configured[name] = value),
  }),
};

type Selected = { textEditor: unknown };
let selected: (event: Selected) => void = () => undefined;

export const window = {
  activeTextEditor: undefined as unknown,
  createTextEditorDecorationType: () => nothing,
  onDidChangeActiveTextEditor: () => nothing,
  onDidChangeTextEditorSelection: (listener: (event: Selected) => void) => {
    selected = listener;
    return nothing;
  },
  /** The user moves the cursor in an editor, which is then the active one. */
  move: (textEditor: unknown) => {
    window.activeTextEditor = textEditor;
    selected({ textEditor });
  },
  createStatusBarItem: () => {
    const bar: Record<string, unknown> = { show: () => (bar.visible = true), dispose: () => (bar.visible = false) };
    bars.push(bar);
    return bar;
  },
};
