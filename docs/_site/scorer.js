// The order of search results. Sphinx sorts equal scores by name, so the changelog and the architecture would come before the guides.
const SCORE_OF_PAGE = { recipes: 2, changelog: -12, architecture: -10, faq: -2 };

var Scorer = {
  score: ([page, title, anchor, description, score]) => {
    const query = new URLSearchParams(window.location.search).get("q").trim().toLowerCase();
    const heading = title.split(" > ").pop().toLowerCase();
    const ofPage = SCORE_OF_PAGE[page] ?? (page.startsWith("reference/") ? -4 : 0);
    return score + ofPage + (heading.startsWith(query) ? 10 : 0);
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
