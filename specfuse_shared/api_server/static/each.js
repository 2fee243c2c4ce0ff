// Each member's own answer beside the joint one; what they say otherwise is marked when all have ended.
// The rules are those of specfuse_shared/agreement.py. Text of models goes through textContent.

const WORD = /(?:(?<![\p{L}\p{N}])[-\u2212](?=\p{Nd}))?[\p{L}\p{N}]+(?:[.,:'’-][\p{L}\p{N}]+)*/gu;
const QUOTED = /"[^"\n]{1,80}"|“[^”\n]{1,80}”|„[^“”\n]{1,80}[“”]|«[^»\n]{1,80}»/gu;
const LONG = 4; // characters of a word that counts: shorter ones are mostly grammar

const key = word => (/\p{Nd}/u.test(word)
  ? word.replace(/(?<=\d),(?=\d{3}(?!\d))/g, "").replace("\u2212", "-")
  : word.replace(/[.,:'’-]/g, "")).toLowerCase();

function kind(word, begins, quoted) {
  if (/\p{Nd}/u.test(word)) return "number";
  const characters = [...word];
  const capitals = (begins ? characters.slice(1) : characters).join("");
  if (characters.length > 1 && /\p{Lu}/u.test(capitals) && !/^I['’]/.test(word)) return "name";
  if (characters.length < LONG) return null;
  return quoted ? "name" : "word";
}

// For each text the stretches that another one lacks: [start, end, kind], in their order.
export function differences(texts) {
  const words = texts.map(text => [...text.matchAll(WORD)]);
  const said = words.map(own => new Set(own.map(([word]) => key(word))));
  return words.map((own, number) => {
    const others = said.filter((_, other) => other !== number);
    const quotes = [...texts[number].matchAll(QUOTED)].map(match => [match.index, match.index + match[0].length]);
    let end = 0;
    return own.map(match => {
      const between = texts[number].slice(end, match.index);
      const begins = match === own[0] || /[.!?:\n]/.test(between);
      end = match.index + match[0].length;
      while (quotes.length && quotes[0][1] <= match.index) quotes.shift();
      const quoted = quotes.length > 0 && quotes[0][0] < match.index;
      const lacks = others.some(other => !other.has(key(match[0])));
      return lacks ? [match.index, end, kind(match[0], begins, quoted)] : [0, 0, null];
    }).filter(([, , found]) => found);
  });
}

function marked(text, marks) {
  const parts = [];
  let at = 0;
  for (const [start, end, found] of marks) {
    const mark = Object.assign(document.createElement("mark"), { textContent: text.slice(start, end), className: found });
    parts.push(text.slice(at, start), mark);
    at = end;
  }
  return [...parts, text.slice(at)];
}

// Shows the answers of `columns` ({ name, text, problem, over }) in the section; they are the same objects each time.
export function drawColumns(section, columns) {
  const place = section.querySelector(".answers");
  section.hidden = !columns.length;
  if (place.childElementCount !== columns.length)
    place.replaceChildren(...columns.map(() => {
      const [column, name, text, problem] = ["article", "h3", "p", "p"].map(tag => document.createElement(tag));
      text.dir = "auto";
      problem.className = "problem";
      column.append(name, text, problem);
      return column;
    }));
  const over = columns.every(column => column.over);
  const marks = over ? differences(columns.map(column => column.text)) : columns.map(() => []);
  columns.forEach((column, i) => {
    const [name, text, problem] = place.children[i].children;
    name.textContent = column.name;
    text.replaceChildren(...marked(column.text, marks[i]));
    problem.textContent = column.problem;
    problem.hidden = !column.problem;
  });
  section.querySelector(".legend").hidden = !over;
}
