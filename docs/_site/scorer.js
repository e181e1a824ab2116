// The order of search results. Sphinx sorts equal scores by name, so the changelog and the architecture would come before the guides.
const SCORE_OF_PAGE = { recipes: 2, changelog: -12, architecture: -10, contributing: -8, faq: -2 };

// The guide to a word that its headings do not begin with.
const GUIDE_OF_WORD = {
  profile: "timeline", "slow rank": "timeline", straggler: "timeline", "gradient clipping": "recipes",
  fsdp: "sharding", zero: "sharding", int8: "slow_links", compression: "slow_links", codec: "slow_links",
  "local sgd": "slow_machines", diloco: "slow_machines", hang: "failures", stall: "failures",
  slurm: "clusters", kubernetes: "agents", horovod: "from-horovod", errors: "reference/errors",
};

var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const query = new URLSearchParams(window.location.search).get("q").trim().toLowerCase();
    const heading = title.split(" > ").pop().toLowerCase();
    const ofPage = SCORE_OF_PAGE[page] ?? (page.startsWith("reference/") ? -4 : 0);
    const ofGuide = Object.hasOwn(GUIDE_OF_WORD, query) && GUIDE_OF_WORD[query] === page ? 40 : 0;
    return score + ofPage + ofGuide + (heading.startsWith(query) ? 10 : 0);
  },
  // As Sphinx has them.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
