import { render } from "preact";
import { ApiDocs } from "./api_docs";
import "./page.css";
import { FiguresPanel } from "./figures_panel";
import { FormPanel } from "./form_panel";
import { Header } from "./header";
import { OutputPanel } from "./output_panel";
import { busy, live, notice, shown, stop, watch } from "./store";
import { TracePanel } from "./trace_panel";
import { StepPanel } from "./step_panel";
import { count, ms } from "./figures";

function App() {
  return (
    <div class="app">
      <a class="skip" href="#output">
        Skip to the output
      </a>
      <Header />
      <main class={shown.value ? "" : "fresh"}>
        <FormPanel />
        <StepPanel />
        <div class="column">
          <Notice />
          <OutputPanel />
        </div>
        <div class="column side">
          <FiguresPanel />
          <TracePanel />
        </div>
      </main>
      <p class="sr" role="status">
        <Announcement />
      </p>
    </div>
  );
}

function Notice() {
  if (!notice.value) return null;
  return (
    <div class="notice" role="alert">
      <span aria-hidden="true">!</span>
      <p>{notice.value.message}</p>
      <button type="button" class="quiet" onClick={() => (notice.value = null)} aria-label="Dismiss">
        ✕
      </button>
    </div>
  );
}

/** The progress, for screen readers; the tokens are read on demand. */
function Announcement() {
  const run = live(shown.value);
  if (!run) return null;
  if (busy.value) return <>Generating, speculation {run.mode}.</>;
  return <>{run.state}: {count(run.tokens.length, "token")} in {ms(run.lastMs)}.</>;
}

render(location.pathname === "/docs" ? <ApiDocs /> : <App />, document.getElementById("page")!);
// Wherever the focus is, which may be on nothing.
addEventListener("keydown", (event) => event.key === "Escape" && stop());
void watch();
