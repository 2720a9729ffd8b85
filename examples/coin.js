// The environment of coin_server.py in JavaScript, written against the published contract alone.
//
//   npm install @grpc/grpc-js @grpc/proto-loader
//   node coin.js --port 7730                 env_manager dials it: servers = ["127.0.0.1:7730"]
//   node coin.js --attach 127.0.0.1:7720     it dials in to env_manager, with the token in $ATTACH_TOKEN

const path = require("node:path");
const { parseArgs } = require("node:util");
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const contract = loader.loadSync("rollfarm/v1/environment.proto", {
  includeDirs: [process.env.ROLLFARM_PROTO ?? path.join(__dirname, "..", "proto")],
  keepCase: true,
  longs: String,
  oneofs: true,
  defaults: true,
});
const { EnvironmentService, EnvManagerService } = grpc.loadPackageDefinition(contract).rollfarm.v1;

const OTHER = { heads: "tails", tails: "heads" };

class Coin {
  constructor(seed, { flips = 3, ...unknown }) {
    if (Object.keys(unknown).length) throw failure("INVALID_ARGUMENT", `Unknown settings: ${Object.keys(unknown)}.`);
    this.chance = randomFrom(seed);
    Object.assign(this, { flips, turn: 0, hits: 0 });
  }

  flip() {
    this.side = this.chance() < 0.5 ? "heads" : "tails";
    return [{ author: "AUTHOR_ENVIRONMENT", text: `the coin shows ${this.side}` }];
  }

  step(action) {
    const right = Number(action.trim() === OTHER[this.side]);
    this.turn += 1;
    this.hits += right;
    return {
      messages: this.flip(),
      reward: right / this.flips,
      done: this.turn === this.flips,
      metrics: { success: this.hits / this.flips },
    };
  }
}

// Each call of the contract. A call that comes again gets its first answer.
class Episodes {
  open = new Map();

  describe() {
    return { environments: [{ name: "coin", description: "Call the other side of the coin." }] };
  }

  reset({ session_id, task }) {
    if (task.environment !== "coin") throw failure("NOT_FOUND", `Unknown environment ${task.environment}. Known: coin.`);
    if (!this.open.has(session_id)) {
      const coin = new Coin(BigInt(task.seed), JSON.parse(task.settings_json || "{}"));
      this.open.set(session_id, { coin, shown: { messages: coin.flip() }, last: -1, answer: null });
    }
    return this.open.get(session_id).shown;
  }

  step({ session_id, step, action }) {
    const episode = this.open.get(session_id);
    if (!episode) throw failure("NOT_FOUND", `No episode ${session_id} is open.`);
    if (step !== episode.last) Object.assign(episode, { last: step, answer: episode.coin.step(action) });
    return episode.answer;
  }

  close({ session_id }) {
    this.open.delete(session_id);
    return {};
  }
}

function serve(port) {
  const episodes = new Episodes();
  const unary = (method) => (call, callback) => {
    try {
      callback(null, episodes[method](call.request));
    } catch (error) {
      callback({ code: error.code ?? grpc.status.INTERNAL, details: error.message });
    }
  };
  const server = new grpc.Server();
  server.addService(EnvironmentService.service, {
    Describe: unary("describe"),
    Reset: unary("reset"),
    Step: unary("step"),
    Close: unary("close"),
  });
  server.bindAsync(`127.0.0.1:${port}`, grpc.ServerCredentials.createInsecure(), (error, bound) => {
    if (error) throw error;
    console.error(`serving at 127.0.0.1:${bound}`);
  });
  process.on("SIGTERM", () => server.tryShutdown(() => process.exit(0)));
}

function attach(address, token) {
  const episodes = new Episodes(); // those of an earlier stream have failed
  const metadata = new grpc.Metadata();
  if (token) metadata.set("authorization", `Bearer ${token}`);
  const client = new EnvManagerService(address, grpc.credentials.createInsecure());
  const stream = client.Attach(metadata);
  stream.on("data", (call) => {
    const answer = { call_id: call.call_id };
    try {
      if (!(call.content in episodes)) throw failure("UNIMPLEMENTED", `No ${call.content} here.`);
      answer[call.content] = episodes[call.content](call[call.content]);
    } catch (error) {
      const code = error.code ?? grpc.status.INTERNAL;
      answer.failure = { code, reason: grpc.status[code], message: error.message };
    }
    stream.write(answer);
  });
  stream.on("error", () => {});
  stream.on("status", ({ code, details }) => {
    console.error(`not attached: ${details}`);
    client.close();
    if (code === grpc.status.UNAUTHENTICATED) process.exit(2);
    setTimeout(attach, 500, address, token);
  });
  stream.write({ hello: episodes.describe() });
}

function failure(code, message) {
  return Object.assign(new Error(message), { code: grpc.status[code] });
}

// mulberry32: equal seeds give equal episodes.
function randomFrom(seed) {
  let state = Number(BigInt.asUintN(32, seed));
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}

const { values } = parseArgs({ options: { port: { type: "string", default: "7730" }, attach: { type: "string" } } });
if (values.attach) attach(values.attach, process.env.ATTACH_TOKEN);
else serve(values.port);
