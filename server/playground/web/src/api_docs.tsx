// A viewer of /openapi.json at /docs.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { getJson, messageOf } from "./api";
import { Header } from "./header";
import { apiKey, connection, locked } from "./store";

interface Schema {
  type?: string;
  enum?: unknown[];
  items?: Schema;
  oneOf?: Schema[];
  anyOf?: Schema[];
  properties?: Record<string, Schema>;
  required?: string[];
  default?: unknown;
  minimum?: number;
  maximum?: number;
  description?: string;
}

interface Operation {
  summary: string;
  requestBody?: { content: Record<string, { schema: Schema }> };
}

interface Document {
  paths: Record<string, Record<string, Operation>>;
}

const api = signal<Document | null>(null);
const error = signal("");

async function load(): Promise<void> {
  try {
    api.value = await getJson<Document>("/openapi.json", apiKey.value);
    error.value = "";
  } catch (failure) {
    error.value = messageOf(failure);
  }
}

export function ApiDocs() {
  const ready = connection.value === "ready";
  useEffect(() => {
    if (ready) void load();
  }, [ready]);
  return (
    <div class="app">
      <Header />
      <main class="docs">
        <p class="hint">
          Every call of the HTTP port, by path. {!locked.value && <a href="/openapi.json">The OpenAPI document</a>}
        </p>
        {error.value && <p class="notice">{error.value}</p>}
        {Object.entries(api.value?.paths ?? {}).flatMap(([path, methods]) =>
          Object.entries(methods).map(([method, operation]) => <Call key={method + path} {...{ path, method, operation }} />),
        )}
      </main>
    </div>
  );
}

function Call({ path, method, operation }: { path: string; method: string; operation: Operation }) {
  const body = Object.values(operation.requestBody?.content ?? {})[0]?.schema;
  const schemas = body?.anyOf ?? (body ? [body] : []);
  return (
    <details class="panel">
      <summary>
        <span class="tag">{method.toUpperCase()}</span> <code>{path}</code> {operation.summary}
      </summary>
      {schemas.map((schema, i) => (
        <div key={i} class="scroll">
          <table>
            <tbody>
              {Object.entries(schema.properties ?? {}).map(([name, field]) => (
                <tr key={name}>
                  <th scope="row">{name}</th>
                  <td>{schema.required?.includes(name) ? "required" : ""}</td>
                  <td>{kind(field)}</td>
                  <td>{field.description}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      ))}
      {!schemas.length && <p class="hint">No body.</p>}
    </details>
  );
}

/** A schema in a few words. */
function kind({ type, enum: values, items, oneOf, default: preset, minimum, maximum }: Schema): string {
  const what = oneOf?.map(kind).join(" or ") ?? values?.map((value) => JSON.stringify(value)).join(", ") ?? type ?? "any";
  const bounds = [minimum !== undefined && `from ${minimum}`, maximum !== undefined && `to ${maximum}`, preset !== undefined && `default ${JSON.stringify(preset)}`];
  return [what + (items ? ` of ${kind(items)}` : ""), ...bounds.filter(Boolean)].join(" ");
}
