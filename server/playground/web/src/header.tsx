import { useEffect, useRef } from "preact/hooks";
import { apiKey, busy, choose, type Connection, connection, info, locked, look, notice, reportOf } from "./store";

const WORDS: Record<Connection, string> = {
  connecting: "Connecting",
  ready: "Ready",
  loading: "Not ready: the engine is loading, restarting or shutting down",
  lost: "No connection, retrying",
  key: "An API key is required",
};

export function Header() {
  const served = info.value;
  return (
    <header>
      <h1>
        <img src="/page/icon.svg" alt="" width="22" height="22" /> specdec
      </h1>
      <p class="model">
        {served && (
          <>
            {served.models.length > 1 ? <Models /> : <b title={served.model}>{served.model.split("/").at(-1)}</b>}
            <span class="facts">
              {served.dtype} · {served.numeric_mode} · context {served.max_context.toLocaleString("en")} · v{served.version}
            </span>
          </>
        )}
      </p>
      <p class={`status s-${connection.value}`} role="status">
        <i aria-hidden="true" />
        {WORDS[connection.value]}
      </p>
      <nav>
        {location.pathname === "/docs" ? <a href="/">Playground</a> : <a href="/docs">API</a>}
        {!locked.value && <Texts experiments={served?.experiments ?? []} />}
      </nav>
      {locked.value && <Key />}
    </header>
  );
}

/** Links to texts of the server. A link cannot carry a key, so with one they would be refused. */
function Texts({ experiments }: { experiments: string[] }) {
  return (
    <>
      <a href="/metrics">Metrics</a>
      {experiments.map((name) => (
        <a key={name} href={reportOf(name)} title="The report of a running experiment, so far">
          Experiment {name}
        </a>
      ))}
    </>
  );
}

function Models() {
  const served = info.value!;
  return (
    <label>
      <span class="sr">Model</span>
      <select value={served.model} disabled={busy.value} onChange={(event) => void choose(event.currentTarget.value)}>
        {served.models.map((name) => (
          <option key={name} value={name}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Look again, with the key. */
async function tryKey() {
  await look();
  if (connection.value !== "key" || !apiKey.value) return;
  notice.value = { message: "The server refuses this key.", field: "", lost: true };
}

function Key() {
  const field = useRef<HTMLInputElement>(null);
  const wanted = connection.value === "key";
  useEffect(() => {
    if (wanted) field.current?.focus();
  }, [wanted]);
  return (
    <form
      class="key"
      onSubmit={(event) => {
        event.preventDefault();
        void tryKey();
      }}
    >
      <label>
        <span class="sr">API key, kept in this tab's memory only</span>
        <input
          ref={field}
          type="password"
          autocomplete="off"
          spellcheck={false}
          placeholder="API key"
          title="Kept in this tab's memory only"
          value={apiKey.value}
          onInput={(event) => (apiKey.value = event.currentTarget.value.replace(/[^!-~]/g, ""))}
          onChange={() => void tryKey()}
        />
      </label>
    </form>
  );
}
