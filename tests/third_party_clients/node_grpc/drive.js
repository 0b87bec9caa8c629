// Drives a running server as a Node program would, and prints what it saw as one line of JSON:
//   node drive.js ADDRESS SCENARIO PROTO_ROOT GOOGLE_ROOT [CA_FILE KEY]
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const protobuf = require("protobufjs");

const [address, scenario, protoRoot, googleRoot, caFile, key] = process.argv.slice(2);
const definition = loader.loadSync(path.join("specdec", "api", "v1", "generation.proto"), {
  keepCase: true, longs: String, enums: String, oneofs: true, defaults: true, includeDirs: [protoRoot],
});
const api = grpc.loadPackageDefinition(definition).specdec.api.v1;
const credentials = caFile ? grpc.credentials.createSsl(fs.readFileSync(caFile)) : grpc.credentials.createInsecure();
const generation = new api.GenerationService(address, credentials);

const metadata = new grpc.Metadata();
if (key) {
  metadata.set("authorization", `Bearer ${key}`);
}

// What errors carry is not part of our services.
const rpc = new protobuf.Root();
rpc.resolvePath = (_origin, target) => (fs.existsSync(target) ? target : path.join(googleRoot, target));
rpc.loadSync(
  ["status.proto", "error_details.proto"].map((name) => path.join(googleRoot, "google", "rpc", name)),
  { keepCase: true },
);

function decode(type, bytes) {
  const kind = rpc.lookupType(type);
  return kind.toObject(kind.decode(bytes), { longs: String, enums: String });
}

// The google.rpc details of a failed call, by type.
function detailsOf(error) {
  const found = {};
  for (const packed of error.metadata.get("grpc-status-details-bin")) {
    for (const detail of decode("google.rpc.Status", packed).details) {
      const type = detail.type_url.split("/").pop();
      found[type] = decode(type, detail.value);
    }
  }
  return found;
}

// Reads a stream to its end: its messages, and how it ended. `onMessage` gets the call and the number of messages so far.
function read(request, options, onMessage) {
  return new Promise((resolve) => {
    const seen = [];
    const call = generation.generateStream(request, metadata, options);
    call.on("data", (message) => {
      seen.push(message);
      if (onMessage) {
        onMessage(call, seen.length);
      }
    });
    call.on("error", (error) => resolve({ seen, code: grpc.status[error.code], details: detailsOf(error) }));
    call.on("end", () => setImmediate(() => resolve({ seen, code: "OK", details: {} })));
  });
}

const long = { text: "x".repeat(100), cache: { salt: "slow" } };
const scenarios = {
  stream: () =>
    read({ text: "hello", request_id: "from-node", sampling: { seed: "18446744073709551615", n: 2 } }, {}),
  bad: () => read({ text: "hello", sampling: { temperature: -1, top_p: 7 } }, {}),
  cancel: () => read(long, {}, (call, count) => count === 3 && call.cancel()),
  deadline: () => read(long, { deadline: Date.now() + 400 }),
};

scenarios[scenario]().then((result) => {
  process.stdout.write(JSON.stringify(result));
  generation.close();
});
