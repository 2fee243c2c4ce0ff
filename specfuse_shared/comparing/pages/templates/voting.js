// Shows two hidden answers at a time and keeps the votes in the page; a saved copy is this page with its votes.
const clean = document.documentElement.cloneNode(true);
const at = id => document.getElementById(id);
const read = id => JSON.parse(at(id).textContent);
const pairs = read("pairs"), names = read("names"), votes = read("votes");
let place = Math.max(0, pairs.findIndex(pair => !(pair.key in votes))), saved = true;

const sideOf = key => ["left", "right"][parseInt(key[0], 16) % 2];

function show() {
  const pair = pairs[place], given = Object.keys(votes).length;
  at("place").textContent = `${place + 1} of ${pairs.length}, ${given} voted`;
  for (const id of ["question", "passage", "left", "right"]) at(id).textContent = pair[id] || (id === "passage" ? "" : "∅ no text");
  at("context").hidden = !pair.passage;
  for (const side of ["left", "equal", "right"]) at(`vote-${side}`).setAttribute("aria-pressed", votes[pair.key] === side);
  at("back").disabled = place === 0;
}

function vote(side) {
  votes[pairs[place].key] = side;
  saved = false;
  at("result").textContent = "";
  if (place < pairs.length - 1) place += 1;
  else at("result").textContent = "That was the last pair. Save the page, or look at the result.";
  show();
}

function back() {
  if (place > 0) place -= 1;
  show();
}

// Wilson's interval of a share, 95 %.
function wilson(won, of) {
  const z = 1.959963984540054, share = won / of, middle = (share + z * z / (2 * of)) / (1 + z * z / of);
  const half = z / (1 + z * z / of) * Math.sqrt(share * (1 - share) / of + z * z / (4 * of * of));
  return [middle - half, middle + half];
}

function reveal() {
  const cast = pairs.filter(pair => pair.key in votes).map(pair => [votes[pair.key], sideOf(pair.key)]);
  const ours = cast.filter(([side, own]) => side === own).length, equal = cast.filter(([side]) => side === "equal").length;
  const of = cast.length - equal, percent = value => (100 * value).toFixed(0);
  if (!of) return void (at("result").textContent = "No vote for one of the two yet.");
  const [low, high] = wilson(ours, of);
  const seen = low > 0.5 ? `${names.ours} is better` : high < 0.5 ? `${names.theirs} is better` : "no difference is seen";
  at("result").textContent = `Of ${of} votes between them ${names.ours} won ${ours}, ${percent(ours / of)} % ` +
    `[${percent(low)}, ${percent(high)}], ${names.theirs} ${of - ours}; ${equal} equal: ${seen}.`;
}

function save() {
  clean.querySelector("#votes").textContent = JSON.stringify(votes).replaceAll("<", "\\u003c");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(["<!doctype html>\n", clean.outerHTML], { type: "text/html" }));
  link.download = "votes.html";
  link.click();
  saved = true;
}

const keys = { ArrowLeft: () => vote("left"), 1: () => vote("left"), ArrowRight: () => vote("right"), 2: () => vote("right"),
  ArrowDown: () => vote("equal"), 0: () => vote("equal"), Backspace: back, r: reveal, s: save };

addEventListener("keydown", event => {
  const act = keys[event.key] ?? keys[event.key.toLowerCase()];
  if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  act();
});
addEventListener("beforeunload", event => saved || event.preventDefault());
for (const side of ["left", "equal", "right"]) at(`vote-${side}`).addEventListener("click", () => vote(side));
at("back").addEventListener("click", back);
at("reveal").addEventListener("click", reveal);
at("save").addEventListener("click", save);
show();
