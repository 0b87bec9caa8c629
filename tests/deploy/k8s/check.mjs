// Checks Kubernetes objects against the schemas of their kinds: reads a JSON list of them from standard input and prints
// a JSON list of complaints, an empty text where there is none and null where no schema is known.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const require = createRequire(import.meta.url);
const PACKAGES = { "keda.sh": "@kubernetes-models/keda", "gateway.networking.k8s.io": "@kubernetes-models/gateway-api" };

function model(object) {
  const [group, version] = object.apiVersion.includes("/") ? object.apiVersion.split("/") : ["", object.apiVersion];
  const root = PACKAGES[group] ?? "kubernetes-models";
  try {
    return require([root, group, version].filter((part) => part).join("/"))[object.kind];
  } catch {
    return undefined;
  }
}

function complaint(object) {
  const Model = model(object);
  if (Model === undefined) return null;
  try {
    new Model(object).validate();
    return "";
  } catch (error) {
    return String(error.message);
  }
}

console.log(JSON.stringify(JSON.parse(readFileSync(0, "utf8")).map(complaint)));
