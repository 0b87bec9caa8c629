// Uses VS Code as people do, in headless Chromium, and tells what it saw as JSON, one line a look.
// node use.mjs FOLDER_WITH_PACKAGES CHROMIUM URL SCENARIO FILE LINE:COLUMN SCREENSHOT
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { basename, join } from "node:path";

const [packages, executablePath, url, scenario, file, place, shot] = process.argv.slice(2);
const require = createRequire(join(packages, "package.json"));
const { chromium } = require("playwright-core");
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const page = await browser.newPage({ viewport: { width: 1200, height: 800 } });
page.setDefaultTimeout(45000);

const bar = page.locator('[id="specdec.specdec.specdec.status"] a');
const ghost = page.locator(".ghost-text-decoration");
/** What the diff of a predicted edit adds, which VS Code draws by style, once it adds something, or nothing. */
async function diff(wanted = true) {
  const found = await page.waitForFunction((wanted) => {
    const contents = [...document.querySelectorAll(".view-lines span")]
      .map((span) => getComputedStyle(span, "::after").content)
      .filter((content) => content.startsWith('"') && content !== '""');
    return contents.length > 0 === wanted && { texts: [...new Set(contents)].map((text) => JSON.parse(text)) };
  }, wanted);
  return (await found.jsonValue()).texts.join("|");
}
const cursor = page.locator('[id="status.editor.selection"]');
const line = async () => /Ln (\d+)/.exec(await cursor.innerText())[1];
const tell = (seen) => console.log(JSON.stringify(seen));
/** Until the status bar shows an icon. */
const showing = (icon) => bar.locator(`.codicon-${icon}`).waitFor();

/** What the status bar says, without its icon. */
async function status() {
  return (await bar.getAttribute("aria-label")).replace(/^\S+\s+specdec, /, "");
}

async function open() {
  await page.goto(url);
  await page.getByRole("treeitem", { name: basename(file) }).dblclick();
  await page.locator(".monaco-editor .view-lines").waitFor();
}

async function go() {
  await page.keyboard.press("Control+g");
  await page.keyboard.type(place);
  await page.keyboard.press("Enter");
}

/** The suggestion, once it is there and has stayed as it is for half a second: it is drawn anew at every key. */
async function suggested() {
  let [text, since] = ["", 0];
  while (since < 5) {
    await page.waitForTimeout(100);
    const now = (await ghost.allTextContents()).join("").replaceAll("\u00a0", " ");
    [text, since] = [now, now !== "" && now === text ? since + 1 : 0];
  }
  return text;
}

/** What is suggested after the first key at the place. */
async function begun() {
  await open();
  await showing("sparkle");
  await go();
  await page.keyboard.type("t");
  return suggested();
}

async function save() {
  const before = readFileSync(file, "utf8");
  await page.keyboard.press("Control+s");
  while (readFileSync(file, "utf8") === before) await page.waitForTimeout(100);
}

const scenarios = {
  async take() {
    const whole = await begun();
    await page.keyboard.type("ot");
    const rest = await suggested();
    await page.screenshot({ path: shot });
    await page.keyboard.press("Tab");
    await ghost.first().waitFor({ state: "detached" });
    await save();
    tell({ status: await status(), whole, rest });
  },

  async cell() {
    await page.goto(url);
    await showing("sparkle"); // by then VS Code knows notebooks
    await page.getByRole("treeitem", { name: basename(file) }).dblclick();
    await page.locator(".notebookOverlay .view-lines").click();
    await page.keyboard.press("Control+End");
    await page.keyboard.type("t");
    tell({ whole: await suggested() });
  },

  async takeWord() {
    const whole = await begun();
    await page.keyboard.press("Control+ArrowRight");
    const left = await suggested();
    await page.keyboard.press("Escape");
    await ghost.first().waitFor({ state: "detached" });
    await save();
    tell({ whole, left });
  },

  async predict() {
    await open();
    await showing("sparkle");
    await go();
    for (const _ of "values") await page.keyboard.press("Delete");
    await page.keyboard.type("numbers");
    const first = await diff();
    await page.keyboard.press("Escape");
    await diff(false);
    await page.keyboard.type("_");
    const seen = [];
    while (seen.length < 3) {
      const text = await diff();
      const at = await line();
      await page.screenshot({ path: shot });
      await page.keyboard.press("Tab");
      await cursor.filter({ hasNotText: `Ln ${at},` }).waitFor();
      seen.push([text, await line()]);
      await page.keyboard.press("Tab");
      await diff(false);
    }
    await page.locator(".view-lines").filter({ hasNotText: "values" }).waitFor();
    await save();
    tell({ first, seen });
  },

  async insertion() {
    await open();
    await showing("sparkle");
    await go();
    await page.keyboard.type("sum = ");
    await suggested(); // a completion or the prediction, whichever came first
    await page.keyboard.press("Escape");
    await ghost.first().waitFor({ state: "detached" });
    await page.keyboard.press("ArrowLeft");
    await page.keyboard.press("ArrowRight");
    const whole = await suggested();
    await page.keyboard.press("Control+ArrowRight");
    const left = await suggested();
    await page.keyboard.press("Tab");
    await ghost.first().waitFor({ state: "detached" });
    await save();
    tell({ whole, left });
  },

  async toggle() {
    await open();
    await showing("sparkle");
    await bar.click();
    await showing("circle-slash");
    const off = await status();
    await go();
    await page.keyboard.type("t");
    await page.waitForTimeout(1500); // the server answers in a tenth of this
    const silent = await ghost.count();
    await bar.click();
    await showing("sparkle");
    await page.locator(".monaco-editor .view-lines").click();
    await go();
    await page.keyboard.press("End");
    await page.keyboard.type("o");
    tell({ off, silent, on: await status(), whole: await suggested() });
    await save();
  },

  async away() {
    await open();
    await showing("debug-disconnect");
    tell({ status: await status() });
    await showing("sparkle"); // whoever runs this starts a server now
    await go();
    await page.keyboard.type("t");
    tell({ status: await status(), whole: await suggested() });
  },
};

try {
  await scenarios[scenario]();
} catch (error) {
  await page.screenshot({ path: shot });
  console.error(error);
  process.exitCode = 1;
}
await browser.close();
