// Uses the page as people do, in headless Chromium, and tells what it saw as JSON.
// node browse.mjs FOLDER_WITH_PACKAGES CHROMIUM URL SCENARIO FOLDER_FOR_SCREENSHOTS [KEY]
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const [packages, executablePath, url, scenario, shots, key] = process.argv.slice(2);
const require = createRequire(join(packages, "package.json"));
const { chromium } = require("playwright-core");
const AXE = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const faults = [];

async function visit(options = {}) {
  const page = await browser.newPage({ viewport: { width: 1440, height: 1000 }, ...options });
  page.setDefaultTimeout(20000);
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && faults.push(message.text()));
  page.on("pageerror", (error) => faults.push(String(error)));
  await page.goto(url);
  return page;
}

const focused = (page) =>
  page.evaluate(() => {
    const at = document.activeElement;
    return `${at.tagName} ${at.getAttribute("name") ?? ""} ${at.getAttribute("role") ?? ""} ${at.textContent.slice(0, 30)}`;
  });

/** Press Tab until the element in focus is described by `pattern`. */
async function tabTo(page, pattern) {
  const seen = [];
  for (let i = 0; i < 60; i++) {
    await page.keyboard.press("Tab");
    const at = await focused(page);
    if (pattern.test(at)) return;
    seen.push(at);
  }
  throw new Error(`no way by keyboard to ${pattern}: ${seen.join(" | ")}`);
}

const ready = (page) => page.locator(".status.s-ready").waitFor();
const finished = (page) => page.locator("p[role=status]", { hasText: /^(done|stopped|failed):/ }).waitFor();
const tree = (page) =>
  page.evaluate(() => ({
    title: document.querySelector("#step-panel-title").textContent,
    label: document.querySelector(".tree svg")?.getAttribute("aria-label"),
    nodes: [...document.querySelectorAll(".tree .node title")].map((title) => title.textContent),
    chosen: document.querySelectorAll(".tree .node.chosen").length,
    token: document.getElementById(document.querySelector("[role=listbox]").getAttribute("aria-activedescendant"))?.ariaLabel,
  }));
const violations = async (page) => {
  await page.evaluate(AXE);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return violations.map(({ id, nodes }) => `${id}: ${nodes.map((node) => node.html.slice(0, 120)).join(" ; ")}`);
};

/** What a visitor sees first, in every size and scheme. */
async function first() {
  const views = [];
  for (const [name, viewport] of [["desktop", { width: 1440, height: 1000 }], ["phone", { width: 390, height: 844 }]]) {
    for (const colorScheme of ["light", "dark"]) {
      const page = await visit({ viewport, colorScheme });
      await ready(page);
      await page.screenshot({ path: join(shots, `first-${name}-${colorScheme}.png`) });
      views.push({
        nodes: await page.locator(".tree .node").evaluateAll((nodes) =>
          nodes.filter((node) => node.getBoundingClientRect().bottom < innerHeight).map((node) => node.querySelector("title").textContent),
        ),
        said: await page.locator(".sample").textContent(),
        width: await page.evaluate(() => document.documentElement.scrollWidth),
        violations: await violations(page),
      });
      await page.close();
    }
  }
  const page = await visit();
  await ready(page);
  const links = await page.locator("nav a").allTextContents();
  await page.getByRole("link", { name: "API" }).click();
  await page.getByText("/v1/chat/completions", { exact: true }).click();
  await page.getByRole("rowheader", { name: "temperature" }).first().waitFor();
  await page.screenshot({ path: join(shots, "docs.png") });
  return { views, links, docs: await violations(page), operations: await page.locator("details").count() };
}

async function keyboard() {
  const page = await visit();
  await ready(page);
  await tabTo(page, /^INPUT kind/);
  await page.keyboard.press("ArrowRight");
  await tabTo(page, /^TEXTAREA prompt/);
  await page.keyboard.press("Control+a");
  await page.keyboard.type("one two three one two three one");
  await tabTo(page, /^INPUT mode/);
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  await tabTo(page, /^INPUT maxTokens/);
  await page.keyboard.press("Control+a");
  await page.keyboard.type("40");
  await page.keyboard.press("Control+Enter");
  await finished(page);
  const best = await tree(page);
  await tabTo(page, /listbox/);
  const first = await tree(page);
  await page.keyboard.press("ArrowDown");
  await page.keyboard.press("ArrowDown");
  const third = await tree(page);
  await page.keyboard.press("ArrowRight");
  const next = await tree(page);
  await page.keyboard.press("End");
  const last = await tree(page);
  await page.keyboard.press("Home");
  const home = await tree(page);
  const tokens = await page.evaluate(() =>
    [...document.querySelectorAll("[role=option]")].map((at) => {
      const style = getComputedStyle(at);
      return { label: at.ariaLabel, text: at.textContent, line: style.textDecorationStyle, tint: style.backgroundColor };
    }),
  );
  await tabTo(page, /^SUMMARY .*The tree as a table/);
  await page.keyboard.press("Enter");
  const rows = await page.locator(".step-panel tbody tr").count();
  await page.screenshot({ path: join(shots, "light.png"), fullPage: true });
  const summary = await page.locator(".output .summary").textContent();
  return { best, first, third, next, last, home, tokens, rows, summary, charts: await page.locator(".figures svg").count() };
}

async function compare() {
  const page = await visit({ colorScheme: "dark" });
  await ready(page);
  await page.getByRole("radio", { name: "Completion" }).check();
  await page.getByRole("button", { name: /A.B/ }).click();
  await page.locator(".verdict").waitFor();
  const verdict = await page.locator(".verdict").textContent();
  const modes = await page.locator(".sides .tag").allTextContents();
  const texts = await page.locator(".sides .tokens").allTextContents();
  await page.getByRole("listbox").last().focus();
  await page.keyboard.press("ArrowDown");
  await page.getByText("The tree as a table").click();
  await page.locator(".trace tbody").first().waitFor();
  await page.screenshot({ path: join(shots, "dark.png"), fullPage: true });
  const dark = await violations(page);
  await page.emulateMedia({ colorScheme: "light" });
  const light = await violations(page);
  await page.setViewportSize({ width: 390, height: 844 });
  const width = await page.evaluate(() => document.documentElement.scrollWidth);
  const times = await page.locator(".sides .summary").allTextContents();
  return { verdict, modes, times, texts, light, dark, width };
}

async function phone() {
  const page = await visit({ viewport: { width: 390, height: 844 } });
  await ready(page);
  const keys = await page.locator("input[type=password]").count();
  const folded = await page.locator("[name=temperature]").isHidden();
  await page.getByText("Settings").click();
  const open = await page.locator("[name=temperature]").isVisible();
  await page.getByText("Settings").click();
  await page.getByRole("radio", { name: "Fill in" }).check();
  const warned = await page.locator(".request .hint").first().textContent();
  const gap = await page.locator("[name=suffix]").inputValue();
  await page.getByRole("radio", { name: "Completion" }).check();
  await page.getByRole("combobox", { name: "Example" }).selectOption("A table");
  const example = await page.locator("[name=prompt]").inputValue();
  await page.getByRole("button", { name: /Generate/ }).click();
  await finished(page);
  const results = await page.locator("details > summary h2").allTextContents();
  const top = await page.evaluate(() => document.getElementById("output").getBoundingClientRect().top);
  const sent = page.waitForRequest("**/v1/completions");
  await page.getByRole("radio", { name: "Fill in" }).check();
  await page.getByRole("button", { name: /Generate/ }).click();
  const body = (await sent).postDataJSON();
  await page.getByRole("alert").waitFor();
  await page.getByRole("button", { name: "Dismiss" }).click();
  faults.length = 0; // the refusal
  await page.screenshot({ path: join(shots, "phone.png"), fullPage: true });
  const width = await page.evaluate(() => document.documentElement.scrollWidth);
  return { keys, folded, open, results, warned, gap, example, top, body, width, violations: await violations(page) };
}

async function trouble() {
  const page = await visit({ reducedMotion: "reduce" });
  await ready(page);
  await page.getByRole("radio", { name: "Completion" }).check();
  await page.route("**/v1/completions", (route) =>
    route.continue({ postData: JSON.stringify({ ...route.request().postDataJSON(), cache_salt: "slow" }) }),
  );
  await page.locator("[name=prompt]").fill("\n".repeat(60)); // echoed, one token each 0.05 s
  await page.locator("[name=maxTokens]").fill("60");
  await page.getByRole("radio", { name: "Off" }).check();
  await page.getByRole("button", { name: /Generate/ }).click();
  await page.locator(".tokens.live").waitFor();
  const animation = await page.evaluate(() => getComputedStyle(document.querySelector(".tokens"), "::after").animationName);
  await page.waitForFunction(() => document.querySelector(".tokens").scrollTop > 50);
  await page.locator(".tokens").evaluate((at) => at.scrollTo(0, 0));
  await page.waitForTimeout(400);
  const scrolled = await page.locator(".tokens").evaluate((at) => at.scrollTop);
  await page.mouse.click(4, 990); // the focus is on nothing now
  await page.keyboard.press("Escape");
  await finished(page);
  const stopped = await page.locator(".output .summary").textContent();
  const copied = await page.locator(".tokens").evaluate((at) => {
    getSelection().selectAllChildren(at);
    const event = new ClipboardEvent("copy", { clipboardData: new DataTransfer(), bubbles: true, cancelable: true });
    return at.dispatchEvent(event) ? String(getSelection()) : event.clipboardData.getData("text/plain");
  });
  const clean = [...faults];
  await page.locator("[name=temperature]").fill("1000");
  await page.getByRole("button", { name: /Generate/ }).click();
  const refused = await page.getByRole("alert").textContent();
  const invalid = await page.locator("[aria-invalid=true]").getAttribute("name");
  await page.locator("[name=temperature]").fill("0");
  const corrected = await page.getByRole("alert").count();
  await page.context().setOffline(true);
  await page.getByRole("button", { name: /Generate/ }).click();
  await page.locator(".status.s-lost").waitFor();
  const lost = [await page.getByRole("alert").textContent(), await page.locator(".status").textContent()];
  await page.screenshot({ path: join(shots, "lost.png"), fullPage: true });
  await page.context().setOffline(false);
  await ready(page);
  const mended = await page.getByRole("alert").count();
  return { animation, scrolled, stopped, copied, clean, refused, invalid, corrected, lost, mended };
}

async function locked() {
  const page = await visit();
  await page.locator(".status.s-key").waitFor();
  const asked = await page.locator(".status").textContent();
  const field = await page.evaluate(() => document.activeElement.type);
  const cut = await page.evaluate(() => {
    const { scrollWidth, clientWidth } = document.querySelector(".request");
    return scrollWidth - clientWidth;
  });
  await page.screenshot({ path: join(shots, "key.png") });
  await page.keyboard.type("mistyped");
  await page.keyboard.press("Enter");
  const refused = await page.getByRole("alert").textContent();
  await page.locator("form.key input").fill(`${key}\u200B`); // as some programs copy it
  await page.keyboard.press("Enter");
  await ready(page);
  const mended = await page.getByRole("alert").count();
  await page.getByRole("radio", { name: "Completion" }).check();
  await page.locator("[name=prompt]").fill("abc");
  await page.locator("[name=maxTokens]").fill("20");
  await page.getByRole("button", { name: /Generate/ }).click();
  await finished(page);
  const tokens = await page.locator(".token").count();
  const links = await page.locator("nav a").allTextContents();
  const kept = await page.evaluate(() => JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie]));
  return { asked, field, cut, refused, mended, tokens, links, kept };
}

try {
  const found = await { first, keyboard, compare, phone, trouble, locked }[scenario]();
  console.log(JSON.stringify({ ...found, faults }));
} finally {
  await browser.close();
}
