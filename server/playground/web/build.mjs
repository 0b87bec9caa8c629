// Builds the playground into a folder, by default ../static: a script, a style sheet, an icon, and an HTML file.
import { copyFileSync, mkdirSync } from "node:fs";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = resolve(process.argv[2] ?? join(here, "..", "static"));
mkdirSync(out, { recursive: true });

await build({
  absWorkingDir: here,
  entryPoints: { page: "src/app.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  charset: "utf8",
  logLevel: "warning",
});
for (const name of ["icon.svg", "index.html"]) copyFileSync(join(here, "src", name), join(out, name));
