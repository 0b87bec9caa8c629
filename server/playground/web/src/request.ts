// The form's contents as the body of a request.
import type { Mode } from "./run";

export interface Message {
  role: "system" | "user" | "assistant";
  content: string;
}

export type Kind = "chat" | "raw" | "fill";

export interface Form {
  kind: Kind;
  messages: Message[];
  prompt: string;
  /** The text after the gap. Only `prefix` and `suffix` are used for it, not `prompt`. */
  suffix: string;
  prefix: string;
  prediction: string;
  mode: Mode;
  /** null: all loaded ones. */
  drafters: string[] | null;
  maxNodes: string;
  maxDepth: string;
  temperature: string;
  seed: string;
  maxTokens: string;
}

const PARSERS = `def parse_header(line):
    name, value = line.split(":", 1)
    return name.strip(), value.strip()


def parse_cookie(line):
    name, value = line.split("=", 1)
`;
const COUNTER = `import re
from collections import Counter


def count_words(text):
    words = re.findall(r"[a-z']+", text.lower())
    counts = Counter(words)
    return counts.most_common()
`;

export interface Example {
  name: string;
  kind: Kind;
  fields: Partial<Form>;
}

const say = (content: string): Partial<Form> => ({ messages: [{ role: "user", content }], prediction: "" });

/** Sample requests; the first of each kind is the default. */
export const EXAMPLES: readonly Example[] = [
  { name: "Write code", kind: "chat", fields: say("Write a Python function that counts the words in a text, then explain it.") },
  {
    name: "Change code (the old text is the prediction)",
    kind: "chat",
    fields: {
      ...say(`Rename \`counts\` to \`frequencies\` and answer with the whole file only.\n\n\`\`\`python\n${COUNTER}\`\`\``),
      prediction: COUNTER,
    },
  },
  { name: "Explain", kind: "chat", fields: say("Why is the sky blue, and why is a sunset red?") },
  { name: "Answer in JSON", kind: "chat", fields: say("List five planets as a JSON array of objects with name, radius_km and moons.") },
  { name: "A second function like the first", kind: "raw", fields: { prompt: PARSERS, prediction: "" } },
  { name: "A table", kind: "raw", fields: { prompt: "| n | n squared | n cubed |\n|---|---|---|\n| 1 | 1 | 1 |\n| 2 | 4 | 8 |\n", prediction: "" } },
  {
    name: "The middle of a function",
    kind: "fill",
    fields: { prefix: "def is_leap(year):\n    ", suffix: "\n\n\ndef days_in_year(year):\n    return 366 if is_leap(year) else 365\n", prediction: "" },
  },
  {
    name: "A body from its tests",
    kind: "fill",
    fields: {
      prefix: "def clamp(value, low, high):\n",
      suffix: "\n\nassert clamp(5, 0, 3) == 3\nassert clamp(-1, 0, 3) == 0\nassert clamp(2, 0, 3) == 2\n",
      prediction: "",
    },
  },
];

export function emptyForm(): Form {
  const first = (kind: Kind) => EXAMPLES.find((example) => example.kind === kind)!.fields;
  return {
    kind: "chat",
    messages: [],
    prompt: "",
    prefix: "",
    suffix: "",
    prediction: "",
    mode: "auto",
    drafters: null,
    maxNodes: "",
    maxDepth: "",
    temperature: "0",
    seed: "1",
    maxTokens: "160",
    ...first("fill"),
    ...first("raw"),
    ...first("chat"),
  };
}

/** The first invalid field of the form. */
export function faultOf(form: Form): { field: keyof Form; message: string } | null {
  if (form.kind === "raw" && form.prompt === "") return { field: "prompt", message: "Write a prompt first." };
  if (form.kind === "fill" && form.suffix === "")
    return { field: "suffix", message: "Write the text after the gap; without it, use Completion." };
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

/** Path and body. `salt` isolates caches from those of other requests; an empty `model` is the server's choice. */
export function requestOf(form: Form, salt: string, model = ""): { path: string; body: object } {
  const speculation: Record<string, unknown> = { mode: form.mode };
  if (form.drafters?.length) speculation.drafters = form.drafters;
  if (form.maxNodes !== "") speculation.max_nodes = Number(form.maxNodes);
  if (form.maxDepth !== "") speculation.max_depth = Number(form.maxDepth);
  const body: Record<string, unknown> = {
    stream: true,
    return_step_trees: true,
    return_token_ids: true,
    max_tokens: Number(form.maxTokens),
    temperature: Number(form.temperature),
    speculation,
  };
  if (model) body.model = model;
  if (form.seed !== "") body.seed = Number(form.seed);
  if (salt) body.cache_salt = salt;
  if (form.prediction) body.prediction = { type: "content", content: form.prediction };
  if (form.kind === "raw") return { path: "/v1/completions", body: { ...body, prompt: form.prompt } };
  if (form.kind === "fill") return { path: "/v1/completions", body: { ...body, prompt: form.prefix, suffix: form.suffix } };
  const messages = form.messages.filter((message) => message.content !== "");
  return { path: "/v1/chat/completions", body: { ...body, messages, separate_reasoning: false } };
}
