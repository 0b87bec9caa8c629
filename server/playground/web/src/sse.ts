// Server-sent events: converts byte chunks to the data of whole events.

/** Each call returns the data of the events that its text completes. */
export class SseParser {
  private rest = "";
  private lines: string[] = [];

  push(piece: string): string[] {
    const found: string[] = [];
    this.rest += piece;
    let start = 0;
    for (;;) {
      const at = nextBreak(this.rest, start);
      if (at < 0) break;
      // A \r at the end may be followed by \n in the next chunk.
      if (this.rest[at] === "\r" && at + 1 === this.rest.length) break;
      this.line(this.rest.slice(start, at), found);
      start = at + (this.rest[at] === "\r" && this.rest[at + 1] === "\n" ? 2 : 1);
    }
    this.rest = this.rest.slice(start);
    return found;
  }

  private line(line: string, found: string[]): void {
    if (line === "") {
      if (this.lines.length) found.push(this.lines.join("\n"));
      this.lines = [];
    } else if (line === "data" || line.startsWith("data:")) {
      this.lines.push(line.slice(5).replace(/^ /, ""));
    }
  }
}

/** The data of the events in `body`. */
export async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const parser = new SseParser();
  const decoder = new TextDecoder();
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

function nextBreak(text: string, from: number): number {
  for (let at = from; at < text.length; at++) if (text[at] === "\n" || text[at] === "\r") return at;
  return -1;
}
