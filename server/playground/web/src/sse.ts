// Server-sent events as this server writes them: `data: ` and one line of data, or `:` while nothing happens, and an
// empty line.

/** The data of the whole events in `body`, whose chunks may be cut anywhere. */
export async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = events.pop()!;
      for (const event of events) if (event.startsWith("data: ")) yield event.slice("data: ".length);
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
