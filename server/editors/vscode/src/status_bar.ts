// The status bar item of the server.
import * as vscode from "vscode";

export interface Status {
  state: string;
  message: string;
  model: string;
  nextEdits: string; // why no edits are predicted; empty: they are
}

const ICONS: Record<string, string> = { ready: "$(sparkle)", busy: "$(loading~spin)", away: "$(debug-disconnect)", off: "$(circle-slash)" };

export class StatusBar implements vscode.Disposable {
  private readonly item: vscode.StatusBarItem;

  constructor() {
    this.item = vscode.window.createStatusBarItem("specdec.status", vscode.StatusBarAlignment.Right, 100);
    this.item.name = "specdec";
    this.item.command = "specdec.toggle";
    this.show({ state: "connecting", message: "", model: "", nextEdits: "" });
    this.item.show();
  }

  show(status: Status): void {
    const about = [status.model, status.message].filter(Boolean).join(": ") || status.state;
    this.item.text = `${ICONS[status.state] ?? "$(sync~spin)"} specdec`;
    const edits = status.nextEdits && ` No next edits: ${status.nextEdits}.`;
    this.item.tooltip = `specdec: ${about}.${edits} Click to switch suggestions on or off.`;
    this.item.backgroundColor =
      status.state === "away" ? new vscode.ThemeColor("statusBarItem.warningBackground") : undefined;
  }

  dispose(): void {
    this.item.dispose();
  }
}
