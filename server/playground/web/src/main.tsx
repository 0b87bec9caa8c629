import { render } from "preact";
import { App } from "./app";
import "./page.css";
import { watch } from "./store";
import { applyTheme } from "./theme";

applyTheme();
render(<App />, document.getElementById("page")!);
void watch();
