// How each drafter looks: a colour and a kind of line, so that colour is not the only difference.

const LOOKS = ["suffix", "model", "prediction", "head", "grammar"];

/** The CSS class of a drafter's name; `target` for the target's own tokens. */
export function look(source: string | undefined): string {
  if (source === undefined || source === "target") return "d-target";
  const name = source.split(":")[0] ?? source;
  return LOOKS.includes(name) ? `d-${name}` : "d-other";
}

/** The drafters that proposed a token, in words. */
export function proposedBy(sources: readonly string[]): string {
  return sources.length ? `proposed by ${sources.join(" and ")}` : "the target's own";
}
