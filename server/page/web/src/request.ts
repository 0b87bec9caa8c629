// The form's contents as the body of a request.
import type { Mode } from "./run";

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export interface Form {
  kind: "chat" | "raw";
  messages: Message[];
  prompt: string;
  prediction: string;
  mode: Mode;
  /** null: all that are loaded. */
  drafters: string[] | null;
  maxNodes: string;
  maxDepth: string;
  temperature: string;
  seed: string;
  maxTokens: string;
}

export const EXAMPLE = `def parse_header(line):
    name, value = line.split(":", 1)
    return name.strip(), value.strip()


def parse_cookie(line):
    name, value = line.split("=", 1)
`;

export function emptyForm(): Form {
  return {
    kind: "chat",
    messages: [{ role: "user", content: "Write a Python function that counts the words in a text, then explain it." }],
    prompt: EXAMPLE,
    prediction: "",
    mode: "auto",
    drafters: null,
    maxNodes: "",
    maxDepth: "",
    temperature: "0",
    seed: "1",
    maxTokens: "160",
  };
}

export interface Fault {
  field: keyof Form;
  message: string;
}

/** The first thing in the form that can not be sent. */
export function faultOf(form: Form): Fault | null {
  if (form.kind === "raw" && form.prompt === "") return { field: "prompt", message: "Write a prompt first." };
  if (form.kind === "chat" && !form.messages.some((m) => m.role === "user" && m.content.trim()))
    return { field: "messages", message: "Write a message first." };
  if (form.drafters?.length === 0 && form.mode !== "off")
    return { field: "drafters", message: "Choose a drafter, or switch speculation off." };
  const whole = /^\d+$/;
  if (!whole.test(form.maxTokens) || form.maxTokens === "0")
    return { field: "maxTokens", message: "Max tokens must be a whole number above 0." };
  if (form.seed !== "" && !/^\d{1,15}$/.test(form.seed))
    return { field: "seed", message: "Seed must be a whole number of at most 15 digits, or empty for a random one." };
  if (!/^\d*\.?\d+$/.test(form.temperature)) return { field: "temperature", message: "Temperature must be a number, 0 or more." };
  for (const field of ["maxNodes", "maxDepth"] as const)
    if (form[field] !== "" && !whole.test(form[field]))
      return { field, message: `${field === "maxNodes" ? "Max nodes" : "Max depth"} must be a whole number, or empty.` };
  return null;
}

/** Path and body. `salt` keeps caches apart from those of other requests, so that runs can be compared. */
export function requestOf(form: Form, mode: Mode, seed: number | null, salt: string): { path: string; body: object } {
  const speculation: Record<string, unknown> = { mode };
  if (form.drafters?.length) speculation.drafters = form.drafters;
  if (form.maxNodes !== "") speculation.max_nodes = Number(form.maxNodes);
  if (form.maxDepth !== "") speculation.max_depth = Number(form.maxDepth);
  const body: Record<string, unknown> = {
    stream: true,
    stream_options: { include_usage: true },
    return_step_trees: true,
    return_token_ids: true,
    max_tokens: Number(form.maxTokens),
    temperature: Number(form.temperature),
    speculation,
  };
  if (seed !== null) body.seed = seed;
  if (salt) body.cache_salt = salt;
  if (form.prediction) body.prediction = { type: "content", content: form.prediction };
  if (form.kind === "raw") return { path: "/v1/completions", body: { ...body, prompt: form.prompt } };
  const messages = form.messages.filter((message) => message.content !== "");
  return { path: "/v1/chat/completions", body: { ...body, messages } };
}
