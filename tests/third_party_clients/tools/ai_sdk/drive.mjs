// What Vercel's AI SDK makes of tools: node drive.mjs URL MODEL. Prints it as JSON.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, model] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "specdec", baseURL: `${url}/v1` });
const inputSchema = jsonSchema({
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, unit: { enum: ["celsius", "kelvin"] } },
  required: ["city", "unit"],
});
const asked = {
  model: provider(model),
  prompt: "What is the weather in Paris?",
  temperature: 0,
  maxOutputTokens: 64,
  maxRetries: 0,
};
const weather = { description: "The weather in a city", inputSchema };

const once = await generateText({ ...asked, tools: { get_weather: tool(weather) }, toolChoice: "required" });

const stream = streamText({
  ...asked,
  tools: { get_weather: tool(weather) },
  toolChoice: { type: "tool", toolName: "get_weather" },
});
const kinds = [];
for await (const part of stream.fullStream) kinds.push(part.type);
const streamed = await stream.toolCalls;

let ran = 0;
const steps = await generateText({
  ...asked,
  tools: {
    get_weather: tool({
      ...weather,
      execute: async () => {
        ran += 1;
        return "Sunny, 25 degrees.";
      },
    }),
  },
  toolChoice: "required",
  stopWhen: stepCountIs(2),
  prepareStep: ({ stepNumber }) => (stepNumber ? { toolChoice: "none" } : {}),
});

const calls = (found) => found.map(({ toolName, input }) => ({ name: toolName, input }));
console.log(
  JSON.stringify({
    called: calls(once.toolCalls),
    reason: once.finishReason,
    streamed: calls(streamed),
    kinds,
    ran,
    said: steps.text,
  }),
);
