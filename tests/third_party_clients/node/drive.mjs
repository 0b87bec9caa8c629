// Runs one scenario against a server and prints what a client saw of it, as JSON.
// Usage: node drive.mjs URL SCENARIO

import { constructLlmApi } from "@continuedev/openai-adapters";
import { Ollama } from "ollama";
import OpenAI from "openai";

const [url, scenario] = process.argv.slice(2);
const messages = [{ role: "user", content: "hi" }];
const fim = { model: "fake", prompt: "a", suffix: "b", max_tokens: 4, temperature: 0.01, stop: ["\n\n"], stream: true };

async function all(stream) {
  const found = [];
  for await (const chunk of await stream) found.push(chunk);
  return found;
}

async function failure(promise) {
  try {
    await promise;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status ?? error.status_code, message: error.message };
  }
  return null;
}

function openai() {
  return new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
}

function provider(name, apiBase) {
  return constructLlmApi({ provider: name, apiKey: "none", apiBase });
}

const scenarios = {
  async openai() {
    const client = openai();
    const completion = { model: "fake", prompt: "hello", max_tokens: 4 };
    const chat = { model: "fake", messages, max_completion_tokens: 6 };
    return {
      completion: await client.completions.create(completion),
      completionStream: await all(client.completions.create({ ...completion, stream: true })),
      gap: await client.completions.create({ ...completion, prompt: "a", suffix: "b" }),
      chat: await client.chat.completions.create(chat),
      chatStream: await all(
        client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } }),
      ),
      models: await all(client.models.list()),
      missing: await failure(client.completions.create({ ...completion, model: "gpt-5" })),
      bad: await failure(client.chat.completions.create({ ...chat, temperature: -1 })),
      full: await failure(client.completions.create({ ...completion, cache_salt: "full" })),
    };
  },

  async openaiTools() {
    const call = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>';
    const tools = [{ type: "function", function: { name: "look", parameters: { type: "object" } } }];
    const asked = { model: "fake", messages: [{ role: "user", content: call }], tools };
    const runner = openai().chat.completions.stream(asked);
    const { choices } = await runner.finalChatCompletion();
    return choices[0];
  },

  async openaiAbort() {
    const body = { model: "fake", prompt: "x".repeat(100), max_tokens: 100, cache_salt: "slow", stream: true };
    const stream = await openai().completions.create(body);
    let chunks = 0;
    for await (const chunk of stream) {
      chunks += chunk.choices.length;
      if (chunks === 2) stream.controller.abort();
    }
    return { chunks };
  },

  async continue() {
    const { signal } = new AbortController();
    const found = {};
    for (const name of ["openai", "vllm", "lmstudio", "llama.cpp", "ollama", "mistral"]) {
      const api = provider(name, `${url}/v1/`);
      const completion = { model: "fake", prompt: "hello", max_tokens: 4, stop: ["1", "2", "3", "4", "5", "6"] };
      const chat = { model: "fake", messages, max_tokens: 6 };
      found[name] = {
        completion: await api.completionNonStream({ ...completion, stream: false }, signal),
        completionStream: await all(api.completionStream({ ...completion, stream: true }, signal)),
        chat: await api.chatCompletionNonStream({ ...chat, stream: false }, signal),
        chatStream: await all(api.chatCompletionStream({ ...chat, stream: true }, signal)),
        models: await api.list(),
      };
    }
    return found;
  },

  async continueMistral() {
    return await all(provider("mistral", `${url}/v1/`).fimStream(fim, new AbortController().signal));
  },

  async continueDeepseek() {
    return await all(provider("deepseek", `${url}/`).fimStream(fim, new AbortController().signal));
  },

  async ollama() {
    const client = new Ollama({ host: url });
    const generate = { model: "fake", prompt: "hi", options: { num_predict: 6 } };
    const chat = { model: "fake", messages, options: { num_predict: 6 } };
    return {
      generate: await client.generate(generate),
      generateStream: await all(client.generate({ ...generate, stream: true })),
      gap: await client.generate({ ...generate, prompt: "a", suffix: "b" }),
      chat: await client.chat(chat),
      chatStream: await all(client.chat({ ...chat, stream: true })),
      list: await client.list(),
      ps: await client.ps(),
      show: await client.show({ model: "fake" }),
      version: await client.version(),
      missing: await failure(client.generate({ ...generate, model: "llama3" })),
      broken: await failure(all(client.generate({ ...generate, cache_salt: "broken", stream: true }))),
    };
  },

  async ollamaAbort() {
    const client = new Ollama({ host: url });
    const body = { model: "fake", prompt: "x".repeat(80), cache_salt: "slow", stream: true };
    const stream = await client.generate(body);
    let chunks = 0;
    const error = await failure(
      (async () => {
        for await (const _ of stream) if (++chunks === 2) client.abort();
      })(),
    );
    return { chunks, kind: error?.kind ?? null };
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));
