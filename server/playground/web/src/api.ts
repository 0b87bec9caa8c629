// Calls of the server.
import { readEvents } from "./sse";
import type { Chunk, WireError } from "./wire";

export class ApiError extends Error {
  /** `status` 0: no answer; -1: a part of one. `field`: the invalid field of the body. */
  constructor(
    readonly status: number,
    message: string,
    readonly field = "",
  ) {
    super(message);
  }
}

export function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** As in an ApiError; -1 for another error. */
export function statusOf(error: unknown): number {
  return error instanceof ApiError ? error.status : -1;
}

async function call(path: string, key: string, init: RequestInit = {}): Promise<Response> {
  const headers = { ...(key && { authorization: `Bearer ${key}` }), ...init.headers };
  let response: Response;
  try {
    response = await fetch(path, { ...init, headers, cache: "no-store" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiError(0, "The server does not answer.");
  }
  if (response.ok) return response;
  const { message, param } = await errorOf(response);
  throw new ApiError(response.status, message, param ?? "");
}

async function errorOf(response: Response): Promise<WireError> {
  const body: unknown = await response.json().catch(() => null);
  const error = (body as { error?: WireError | string } | null)?.error;
  if (typeof error === "string") return { message: error };
  return error ?? { message: `The server answered with status ${response.status}.` };
}

export async function getJson<T>(path: string, key: string): Promise<T> {
  return (await (await call(path, key)).json()) as T;
}

/** The chunks of a streamed answer. Throws an ApiError if it is refused or incomplete. */
export async function* stream(path: string, body: object, key: string, signal: AbortSignal): AsyncGenerator<Chunk> {
  const init = { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal };
  const response = await call(path, key, init);
  if (!response.body) throw new ApiError(0, "The answer is empty.");
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data) as Chunk;
      if (chunk.error) throw new ApiError(500, chunk.error.message, chunk.error.param ?? "");
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ApiError || signal.aborted) throw error;
    throw new ApiError(-1, "The connection closed before the answer was complete.");
  }
  throw new ApiError(-1, "The answer is incomplete.");
}
