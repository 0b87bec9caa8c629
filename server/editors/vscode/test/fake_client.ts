// VS Code's language client, as far as the extension starts and stops it; no server runs.
export const State = { Stopped: 1, Running: 2, Starting: 3 };
export const RevealOutputChannelOn = { Never: 4 };
export const clients: LanguageClient[] = [];

export class LanguageClient {
  state = State.Stopped;
  disposed = false;
  ready: () => void = () => undefined; // the server answers
  crash: () => void = () => undefined; // the server ends
  private started: Promise<void> | undefined;

  constructor(_id: string, _name: string, _server: object, readonly options: { initializationOptions: () => object }) {
    clients.push(this);
  }

  start(): Promise<void> {
    this.state = this.started === undefined ? State.Starting : this.state;
    this.started ??= new Promise((resolve) => {
      this.ready = () => {
        this.state = State.Running;
        resolve();
      };
    });
    return this.started;
  }

  async stop(): Promise<void> {
    if (this.state === State.Starting) {
      throw new Error("Client is not running and can't be stopped");
    }
    await new Promise(setImmediate);
    this.state = State.Stopped;
  }

  dispose(): Promise<void> {
    this.disposed = true;
    return this.stop();
  }

  onNotification(): void {}

  onDidChangeState(listener: (change: { newState: number }) => void): void {
    this.crash = () => {
      this.state = State.Stopped;
      listener({ newState: State.Stopped });
    };
  }
}
