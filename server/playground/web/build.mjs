// Builds the playground into a folder, by default ../static: a script, a style sheet, an icon, and an HTML file whose links
// contain their hashes.
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readFileSync, writeFileSync } from "node:fs";
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
copyFileSync(join(here, "src", "icon.svg"), join(out, "icon.svg"));

const html = readFileSync(join(here, "src", "index.html"), "utf8").replace(/\{\{([\w.]+)\}\}/g, (_, name) => {
  const hash = createHash("sha256").update(readFileSync(join(out, name))).digest("hex").slice(0, 16);
  return `/page/${name}?v=${hash}`;
});
writeFileSync(join(out, "index.html"), html);
